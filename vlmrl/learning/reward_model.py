"""A frozen reward model: scores of responses, or of their steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from vlmrl.data.packing import Pack
from vlmrl.errors import ConfigError
from vlmrl.learning.deepspeed_engine import (
    device,
    init_distributed,
    release_memory,
    sharded_loading,
    start_frozen_engine,
)
from vlmrl.learning.forward import ModelForward, RowsAndMetrics, read_value_model
from vlmrl.learning.settings import RewardModelSettings
from vlmrl.models.buffers import check_buffers
from vlmrl.models.inputs import states_at
from vlmrl.models.value_head import Scale, ValueModel
from vlmrl.observe.metrics import Metric
from vlmrl.plugins import Processor, check_same_inputs, processor_of
from vlmrl.types import Bools, Ints, Sample


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
        self._forward = ModelForward(
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

    @property
    def processor(self) -> Processor:
        """The model's processor."""
        return self._processor

    def score(self, packs: Sequence[Pack]) -> tuple[list[tuple[int, float]], dict[str, Metric]]:
        """Scores: (id, score) for each sample with a non-negative id, from the state at its last token; and pass
        metrics."""
        rows, counts = self._values(packs, [[_last(sample) for sample in pack.samples] for pack in packs])
        mean, std = self._scale
        return [(i, (float(row[-1]) - mean) / std) for i, row in rows], counts

    def step_scores(self, packs: Sequence[Pack], *, as_odds: bool = False) -> RowsAndMetrics:
        """Step scores: (id, [T]) for each sample with a non-negative id, and pass metrics.

        The token that ends a step holds the model's probability that the step is correct, divided by the number of
        steps; other tokens hold 0. So a response's scores sum to their mean, and more steps do not earn more. With
        `as_odds` the scores are the model's log-odds instead.
        """
        assert self._steps is not None, "step scores need a separator"
        ends = [[self._steps.ends(sample) for sample in pack.samples] for pack in packs]
        rows, counts = self._values(packs, ends)
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

    def _values(self, packs: Sequence[Pack], marks: Sequence[Sequence[Bools]]) -> RowsAndMetrics:
        """Values at the marked tokens: (id, [T]) for each sample with a non-negative id, and pass metrics."""
        marks_of = {id(pack): mark for pack, mark in zip(packs, marks, strict=True)}

        def compute(pack: Pack) -> Tensor:
            positions = {name: tensor.to(self._device) for name, tensor in states_at(pack, marks_of[id(pack)]).items()}
            values: Tensor = self._forward.run(pack, positions=positions).values
            return values

        with self._on_device():
            return self._forward.run_packs(packs, compute), self._forward.take_counts()

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


class StepBoundaries:
    """Positions where the steps of a response end."""

    def __init__(self, processor: Processor, separator: str) -> None:
        """A step ends with `separator`. Raises ConfigError when the separator is not the text of whole tokens."""
        self._tokenizer = processor.tokenizer
        self._special = frozenset(processor.tokenizer.all_special_ids)
        self._decoded: dict[int, str] = {}
        self._separator = separator
        ids = processor.tokenizer(separator, add_special_tokens=False).input_ids
        if separator not in "".join(self._pieces(ids)):
            raise ConfigError(
                f"reward.process_separator {separator!r}: the model's tokens split one of its characters: use another"
            )

    def ends(self, sample: Sample) -> Bools:
        """[T]: True at the tokens that end a step: where a separator ends, and the last token of each run of sampled
        tokens, unless only whitespace and special tokens follow the last separator.

        Example: `a=1`, `.\\n\\n`, `b`, `=2`, end token: True at the second and the fifth.
        """
        is_end = np.zeros(len(sample.tokens), dtype=np.bool_)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.sampled, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2):
            is_end[first + self._ends_of_run(sample.tokens[first:last])] = True
        return is_end

    def _ends_of_run(self, tokens: Ints) -> Ints:
        pieces = self._pieces(tokens)
        token_ends = np.cumsum([len(piece) for piece in pieces])
        text = "".join(pieces)
        separator_ends = [match.end() for match in re.finditer(re.escape(self._separator), text)]
        ends = list(np.searchsorted(token_ends, separator_ends))
        after = ends[-1] + 1 if ends else 0
        rest = [
            piece for piece, token in zip(pieces[after:], tokens[after:], strict=True) if token not in self._special
        ]
        if not ends or "".join(rest).strip():
            ends.append(len(tokens) - 1)
        return np.array(ends, dtype=np.int64)

    def _pieces(self, tokens: Sequence[int] | Ints) -> list[str]:
        """Decode each token by itself, so that positions in the text map to tokens."""
        for token in {int(token) for token in tokens} - self._decoded.keys():
            self._decoded[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return [self._decoded[int(token)] for token in tokens]


def _last(sample: Sample) -> Bools:
    return np.arange(len(sample.tokens)) == len(sample.tokens) - 1


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
