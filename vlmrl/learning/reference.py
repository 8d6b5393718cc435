"""The frozen reference model of the KL penalty."""

from __future__ import annotations

from collections.abc import Sequence

from vlmrl.data.packing import Pack
from vlmrl.learning.deepspeed_engine import device, release_memory
from vlmrl.learning.forward import LogprobForward, RowsAndMetrics, read_model
from vlmrl.learning.settings import ReferenceSettings
from vlmrl.models.scorer import Scorer


class Reference:
    """The reference model, one per rank. Each rank holds all weights and works independently, for any
    `ds.zero_stage`."""

    def __init__(self, settings: ReferenceSettings) -> None:
        where = device()
        net, processor = read_model(settings.actor, ds=settings.ds, columns=settings.columns, where=where)
        net.requires_grad_(False)
        self._forward = LogprobForward(
            Scorer(net).to(where).eval(),
            processor,
            temperature=settings.temperature,
            bans=settings.bans,
            device=where,
            cache_bytes=int(settings.vision.cache_gib * 2**30),
        )

    def release(self) -> None:
        """Free the memory that PyTorch caches on the device, for the engines that share it."""
        release_memory()

    def logprobs(self, packs: Sequence[Pack]) -> RowsAndMetrics:
        """Log-probs: (id, [T]) for each sample with a non-negative id, and pass metrics."""
        return self._forward.logprobs(packs), self._forward.take_counts()
