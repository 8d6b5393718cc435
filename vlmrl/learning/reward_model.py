"""A model that says what answers, or the steps of answers, are worth: frozen, and the same for the whole run."""

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
from vlmrl.learning.deepspeed_engine import device, init_distributed, release_memory, sharded_loading, start_frozen
from vlmrl.learning.forward import Passes, Scored, read_value_model
from vlmrl.learning.settings import RewardModelSettings
from vlmrl.models.buffers import check_buffers
from vlmrl.models.inputs import states_at
from vlmrl.models.value_head import Scale, Valuer
from vlmrl.observe.metrics import Metric
from vlmrl.plugins import Processor, check_same_inputs, processor_of
from vlmrl.types import Bools, Ints, Sample


class RewardModel:
    """One per rank. Each rank holds the whole model and works alone, but for `ds.zero_stage` 3, where its weights are
    sharded, and every method is a collective.
    """

    def __init__(self, settings: RewardModelSettings) -> None:
        """Raises ConfigError when it is no reward model, when it reads other tokens or images than the actor, or when
        its config.json holds no scale to normalise with.
        """
        path, flag, actor = settings.path, settings.flag, settings.actor
        columns, offload = settings.columns, settings.offload
        is_sharded = settings.ds.zero_stage == 3
        if is_sharded:
            init_distributed(settings.loop.timeout_s)
        self._device = device()
        # In 4 bits it would be another model, and its scores would be others: nothing trains that could make up for it.
        ds = settings.ds.model_copy(update={"load_in_4bit": False})
        model = actor.model_copy(update={"model_name_or_path": path})
        with sharded_loading(ds, offload=offload):
            net, reader = read_value_model(model, ds=ds, columns=columns, where=self._device, head_seed=None, flag=flag)
        actors = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
        check_same_inputs(reader, actors, what=f"{flag}: {path}", actor=actor.model_name_or_path)
        self._processor = reader
        net.requires_grad_(False)
        self._scale = _scale(net.config, path, flag) if settings.normalize else Scale(0.0, 1.0)
        self._steps = None if settings.separator is None else Steps(reader, settings.separator)
        self._valuer = Valuer(net).eval()
        self._comes_and_goes = offload and not is_sharded
        if not is_sharded and not offload:
            self._valuer.to(self._device)
        self._passes = Passes(
            self._valuer,
            reader,
            device=self._device,
            cache_bytes=int(settings.vision.cache_gib * 2**30),
            call=start_frozen(self._valuer, ds=ds, offload=offload) if is_sharded else self._valuer,
            ranks_move_together=is_sharded and torch.distributed.get_world_size() > 1,
        )
        check_buffers(net)

    def release(self) -> None:
        """Give back the memory that passes have left on the device, for the engines that share it."""
        release_memory()

    @property
    def processor(self) -> Processor:
        """What makes tokens and pixels for it."""
        return self._processor

    def score(self, packs: Sequence[Pack]) -> tuple[list[tuple[int, float]], dict[str, Metric]]:
        """(id, score) of each sample with an id of 0 or more, from the state at its last token; and what it took."""
        rows, counts = self._values(packs, [[_last(sample) for sample in pack.samples] for pack in packs])
        mean, std = self._scale
        return [(i, (float(row[-1]) - mean) / std) for i, row in rows], counts

    def step_scores(self, packs: Sequence[Pack], *, as_odds: bool = False) -> Scored:
        """(id, [T]) of each sample with an id of 0 or more: at the token that ends a step, how likely the model takes
        the step to be right, divided by the number of steps; 0 elsewhere. And what it took.

        So the scores of an answer add up to their mean, and many steps are worth no more than few. `as_odds`: instead,
        the log-odds as the model says them.
        """
        assert self._steps is not None, "a reward model that is not told what ends a step knows no steps"
        ends = [[self._steps.ends(sample) for sample in pack.samples] for pack in packs]
        rows, counts = self._values(packs, ends)
        by_id = {
            i: end for pack, marks in zip(packs, ends, strict=True) for i, end in zip(pack.ids, marks, strict=True)
        }
        found = []
        for i, row in rows:
            end = by_id[i]
            # The value is the log-odds of a right step.
            if as_odds:
                found.append((i, np.where(end, row, 0.0).astype(np.float32)))
                continue
            share = np.where(end, 1.0 / (1.0 + np.exp(-row.astype(np.float64))), 0.0) / max(1, int(end.sum()))
            found.append((i, share.astype(np.float32)))
        return found, counts

    def _values(self, packs: Sequence[Pack], marks: Sequence[Sequence[Bools]]) -> Scored:
        """(id, [T]) of each sample: the values at its marked tokens."""
        marks_of = {id(pack): mark for pack, mark in zip(packs, marks, strict=True)}

        def say(pack: Pack) -> Tensor:
            asked = {name: tensor.to(self._device) for name, tensor in states_at(pack, marks_of[id(pack)]).items()}
            found: Tensor = self._passes.run(pack, asked=asked).values
            return found

        with self._present():
            return self._passes.each(packs, say), self._passes.take_counts()

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Within the context, the weights are where this rank computes."""
        if not self._comes_and_goes:
            yield
            return
        self._valuer.to(self._device)
        try:
            yield
        finally:
            self._valuer.cpu()
            release_memory()


class Steps:
    """Finds where the steps of an answer end."""

    def __init__(self, processor: Processor, separator: str) -> None:
        """A step ends with `separator`. Raises ConfigError when no tokens of the model spell it."""
        self._tokenizer = processor.tokenizer
        self._special = frozenset(processor.tokenizer.all_special_ids)
        self._spelt: dict[int, str] = {}
        self._separator = separator
        ids = processor.tokenizer(separator, add_special_tokens=False).input_ids
        if separator not in "".join(self._pieces(ids)):
            raise ConfigError(
                f"reward.process_separator {separator!r}: the model's tokens cut it within a character: use another one"
            )

    def ends(self, sample: Sample) -> Bools:
        """[T]: True at the tokens that end a step: where a separator ends, and the last token of each run of sampled
        tokens, unless nothing but blanks and special tokens has been said since the separator before it.

        Example: `a=1`, `.\\n\\n`, `b`, `=2`, end token: True at the second and the fifth.
        """
        found = np.zeros(len(sample.tokens), dtype=np.bool_)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.sampled, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2):
            found[first + self._ends_of_run(sample.tokens[first:last])] = True
        return found

    def _ends_of_run(self, tokens: Ints) -> Ints:
        pieces = self._pieces(tokens)
        reached = np.cumsum([len(piece) for piece in pieces])
        text = "".join(pieces)
        ends = [match.end() for match in re.finditer(re.escape(self._separator), text)]
        found = list(np.searchsorted(reached, ends))
        after = found[-1] + 1 if found else 0
        said = [
            piece for piece, token in zip(pieces[after:], tokens[after:], strict=True) if token not in self._special
        ]
        if not found or "".join(said).strip():
            found.append(len(tokens) - 1)
        return np.array(found, dtype=np.int64)

    def _pieces(self, tokens: Sequence[int] | Ints) -> list[str]:
        """What each token spells by itself, so that a place in the text is a place among the tokens."""
        for token in {int(token) for token in tokens} - self._spelt.keys():
            self._spelt[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return [self._spelt[int(token)] for token in tokens]


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
