"""The frozen teacher of on-policy distillation: log-probs of the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from vlmrl.data.packing import Pack
from vlmrl.learning.deepspeed_engine import (
    device,
    init_distributed,
    release_memory,
    sharded_loading,
    start_frozen_engine,
)
from vlmrl.learning.forward import LogprobForward, RowsAndMetrics, read_model
from vlmrl.learning.settings import TeacherSettings
from vlmrl.models.buffers import check_buffers
from vlmrl.models.load import skeleton
from vlmrl.models.scorer import Scorer
from vlmrl.plugins import check_same_inputs, processor_of


class Teacher:
    """The teacher, one per rank. Each rank holds all weights and works independently; with `ds.zero_stage` 3 the
    weights are sharded, and every method is a collective.

    Its distribution is over the ids that the policy has too: the output layers of a family's sizes may have different
    numbers of rows behind their common tokens.
    """

    def __init__(self, settings: TeacherSettings) -> None:
        """Raises ConfigError when its tokens or image processing differ from the actor's."""
        path, actor, is_sharded = settings.path, settings.actor, settings.ds.zero_stage == 3
        if is_sharded:
            init_distributed(settings.loop.timeout_s)
        self._device = device()
        num_ids = vocabulary_of(actor.model_name_or_path, trust_remote_code=actor.trust_remote_code)
        self._num_ids = vocabulary_of(path, trust_remote_code=actor.trust_remote_code)
        # Never in 4 bits: the student would learn the errors of the quantization.
        ds = settings.ds.model_copy(update={"load_in_4bit": False})
        model = actor.model_copy(update={"model_name_or_path": path})
        with sharded_loading(ds, offload=settings.offload):
            net, processor = read_model(model, ds=ds, columns=settings.columns, where=self._device)
        of_actor = processor_of(actor.model_name_or_path, settings.columns, trust_remote_code=actor.trust_remote_code)
        check_same_inputs(processor, of_actor, what=f"{settings.flag}: {path}", actor=actor.model_name_or_path)
        net.requires_grad_(False)
        self._scorer = Scorer(net).eval()
        self._moves_to_device = settings.offload and not is_sharded
        if not is_sharded and not settings.offload:
            self._scorer.to(self._device)
        self._forward = LogprobForward(
            self._scorer,
            processor,
            temperature=settings.temperature,
            bans=settings.bans,
            more_bans=range(num_ids, self._num_ids),
            device=self._device,
            cache_bytes=int(settings.vision.cache_gib * 2**30),
            call=start_frozen_engine(self._scorer, ds=ds, offload=settings.offload) if is_sharded else self._scorer,
            ranks_in_lockstep=is_sharded and torch.distributed.get_world_size() > 1,
        )
        check_buffers(net)

    def release(self) -> None:
        """Free the memory that PyTorch caches on the device, for the engines that share it."""
        release_memory()

    def logprobs(self, packs: Sequence[Pack]) -> RowsAndMetrics:
        """Log-probs: (id, [T]) for each sample with a non-negative id, NaN at tokens that the teacher does not have;
        and pass metrics."""
        known = [_with_known_tokens(pack, self._num_ids) for pack in packs]
        with self._on_device():
            rows = self._forward.logprobs(known)
        tokens = {i: s.tokens for pack in packs for i, s in zip(pack.ids, pack.samples, strict=True)}
        rows = [(i, np.where(tokens[i] < self._num_ids, row, np.float32(np.nan))) for i, row in rows]
        return rows, self._forward.take_counts()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Keep offloaded weights on the device within the context."""
        if not self._moves_to_device:
            yield
            return
        self._scorer.to(self._device)
        try:
            yield
        finally:
            self._scorer.cpu()
            release_memory()


def vocabulary_of(path: str, *, trust_remote_code: bool) -> int:
    """Return the number of ids of a model's output layer, which may be more than its tokenizer has."""
    head = skeleton(path, trust_remote_code=trust_remote_code).get_output_embeddings()
    return int(head.weight.shape[0])


def _with_known_tokens(pack: Pack, num_ids: int) -> Pack:
    """Replace the ids that the teacher does not have, which no text contains, by a token that it has."""
    if all(int(sample.tokens.max()) < num_ids for sample in pack.samples):
        return pack
    known = tuple(
        replace(sample, tokens=np.where(sample.tokens < num_ids, sample.tokens, 0)) for sample in pack.samples
    )
    return replace(pack, samples=known)
