"""The model that the KL penalty holds the policy near: frozen, and the same for the whole run."""

from __future__ import annotations

from collections.abc import Sequence

from vlmrl.data.packing import Pack
from vlmrl.learning.deepspeed_engine import device, release_memory
from vlmrl.learning.forward import Forward, Scored, read_model
from vlmrl.learning.settings import ReferenceSettings
from vlmrl.models.scorer import Scorer


class Reference:
    """One per rank. Each rank holds the whole model and works alone, whatever `ds.zero_stage` says of the policy."""

    def __init__(self, settings: ReferenceSettings) -> None:
        where = device()
        net, processor = read_model(settings.actor, ds=settings.ds, columns=settings.columns, where=where)
        net.requires_grad_(False)
        self._forward = Forward(
            Scorer(net).to(where).eval(),
            processor,
            temperature=settings.temperature,
            bans=settings.bans,
            device=where,
            cache_bytes=int(settings.vision.cache_gib * 2**30),
        )

    def release(self) -> None:
        """Give back the memory that passes have left on the device, for the engines that share it."""
        release_memory()

    def logprobs(self, packs: Sequence[Pack]) -> Scored:
        """(id, [T]) of each sample with an id of 0 or more, and what it took."""
        return self._forward.logprobs(packs), self._forward.take_counts()
