"""A frozen reward model: scores of responses, or of their steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedConfig

from vlmrl.data.packing import Pack
from vlmrl.data.step_ends import StepBoundaries
from vlmrl.errors import ConfigError
from vlmrl.learning.deepspeed_engine import (
    device,
    init_distributed,
    release_memory,
    sharded_loading,
    start_frozen_engine,
)
from vlmrl.learning.forward import RowsAndMetrics, StateForward, read_value_model
from vlmrl.learning.settings import RewardModelSettings
from vlmrl.models.buffers import check_buffers
from vlmrl.models.linear_attention import mixes_samples
from vlmrl.models.patch_cost import patch_cost
from vlmrl.models.value_head import Scale, ValueModel
from vlmrl.observe.metrics import Metric
from vlmrl.plugins import Processor, check_same_inputs, processor_of


class RewardModel:
    """A reward model, one per rank. Each rank holds all weights and works independently; with `ds.zero_stage` 3 the
    weights are sharded, and every method is a collective.
    """

    def __init__(self, settings: RewardModelSettings) -> None:
        """Raises ConfigError when the model has no score layer, when its tokens or image processing differ from the
        actor's, or when its config.json holds no scale to normalize with.
        """
        path, flag, actor = settings.path, settings.flag, settings.actor
        columns, offload = settings.columns, settings.offload
        is_sharded = settings.ds.zero_stage == 3
        if is_sharded:
            init_distributed(settings.loop.timeout_s)
        self._device = device()
        # Never in 4 bits, which would change the scores: nothing trains that could compensate for it.
        ds = settings.ds.model_copy(update={"load_in_4bit": False})
        model = actor.model_copy(update={"model_name_or_path": path})
        with sharded_loading(ds, offload=offload):
            net, processor = read_value_model(
                model, ds=ds, columns=columns, where=self._device, head_seed=None, flag=flag
            )
        of_actor = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
        check_same_inputs(processor, of_actor, what=f"{flag}: {path}", actor=actor.model_name_or_path)
        self._processor = processor
        net.requires_grad_(False)
        self._scale = _scale(net.config, path, flag) if settings.normalize else Scale(0.0, 1.0)
        self._steps = None if settings.separator is None else StepBoundaries(processor, settings.separator)
        self._value_model = ValueModel(net).eval()
        self._moves_to_device = offload and not is_sharded
        if not is_sharded and not offload:
            self._value_model.to(self._device)
        self._forward = StateForward(
            self._value_model,
            processor,
            device=self._device,
            cache_bytes=int(settings.vision.cache_gib * 2**30),
            call=start_frozen_engine(self._value_model, ds=ds, offload=offload) if is_sharded else self._value_model,
            ranks_in_lockstep=is_sharded and torch.distributed.get_world_size() > 1,
        )
        check_buffers(net)

    def release(self) -> None:
        """Free the memory that PyTorch caches on the device, for the engines that share it."""
        release_memory()

    def traits(self) -> tuple[float, bool]:
        """See `Policy.traits`."""
        net = self._value_model.net
        return patch_cost(net, self._processor), mixes_samples(net)

    @property
    def processor(self) -> Processor:
        """The model's processor."""
        return self._processor

    def score(self, packs: Sequence[Pack]) -> tuple[list[tuple[int, float]], dict[str, Metric]]:
        """Scores: (id, score) for each sample with a non-negative id, from the state at its last token; and pass
        metrics."""
        with self._on_device():
            scores, counts = self._forward.scores(packs), self._forward.take_counts()
        mean, std = self._scale
        return [(i, (score - mean) / std) for i, score in scores], counts

    def step_scores(self, packs: Sequence[Pack], *, as_odds: bool = False) -> RowsAndMetrics:
        """Step scores: (id, [T]) for each sample with a non-negative id, and pass metrics.

        The token that ends a step holds the model's probability that the step is correct, divided by the number of
        steps; other tokens hold 0. So a response's scores sum to their mean, and more steps do not earn more. With
        `as_odds` the scores are the model's log-odds instead.
        """
        assert self._steps is not None, "step scores need a separator"
        ends = [[self._steps.ends(sample) for sample in pack.samples] for pack in packs]
        with self._on_device():
            rows, counts = self._forward.values_at(packs, ends), self._forward.take_counts()
        by_id = {
            i: end for pack, marks in zip(packs, ends, strict=True) for i, end in zip(pack.ids, marks, strict=True)
        }
        scores = []
        for i, row in rows:
            end = by_id[i]
            # A value is the log-odds of a correct step.
            if as_odds:
                scores.append((i, np.where(end, row, 0.0).astype(np.float32)))
                continue
            share = np.where(end, 1.0 / (1.0 + np.exp(-row.astype(np.float64))), 0.0) / max(1, int(end.sum()))
            scores.append((i, share.astype(np.float32)))
        return scores, counts

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Keep offloaded weights on the device within the context."""
        if not self._moves_to_device:
            yield
            return
        self._value_model.to(self._device)
        try:
            yield
        finally:
            self._value_model.cpu()
            release_memory()


def _scale(config: PreTrainedConfig, path: str, flag: str) -> Scale:
    try:
        scale = Scale(float(config.mean), float(config.std))
    except (AttributeError, TypeError, ValueError):
        scale = Scale(math.nan, math.nan)
    if not (math.isfinite(scale.mean) and 0 < scale.std < math.inf):
        raise ConfigError(
            f"reward.normalize_enable: config.json of {path} ({flag}) holds no mean and std of its scores: leave it out"
        )
    return scale
