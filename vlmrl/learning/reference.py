"""The model that the KL penalty holds the policy near: frozen, and the same for the whole run."""

from __future__ import annotations

from collections.abc import Sequence

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.packing import Pack
from vlmrl.learning.deepspeed_engine import device, release_memory
from vlmrl.learning.forward import Forward, Scored, read_model
from vlmrl.models.scorer import Scorer


class Reference:
    """One per rank. Each rank holds the whole model and works alone, whatever `ds.zero_stage` says of the policy."""

    def __init__(
        self,
        *,
        actor: Model,
        ds: Ds,
        loop: Loop,
        columns: Columns,
        vision: Vision,
        temperature: float,
        bans: bool,
    ) -> None:
        """`actor` names the model; the rest is the policy's, so that both are asked the same question."""
        where = device()
        net, processor = read_model(actor, ds=ds, columns=columns, where=where)
        net.requires_grad_(False)
        scorer = Scorer(net).to(where).eval()
        self._forward = Forward(
            scorer,
            processor,
            temperature=temperature,
            bans=bans,
            device=where,
            cache_bytes=int(vision.cache_gib * 2**30),
        )

    def release(self) -> None:
        """Give back the memory that passes have left on the device, for the engines that share it."""
        release_memory()

    def logprobs(self, packs: Sequence[Pack]) -> Scored:
        """(id, [T]) of each sample with an id of 0 or more, and what it took."""
        return self._forward.logprobs(packs), self._forward.take_counts()
