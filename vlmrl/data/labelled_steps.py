"""Rows with a response and a label for each of its steps, as samples with labels at the ends of the steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vlmrl.data.columns import value_at
from vlmrl.data.media import InlineMedia
from vlmrl.data.order import RowIndex
from vlmrl.data.prompts import PromptStream
from vlmrl.data.question import Question
from vlmrl.data.responses import check_response, sft_sample
from vlmrl.data.step_ends import StepBoundaries
from vlmrl.data.unusable import UnusableError, unusable_on_error
from vlmrl.types import Floats, Media, Prompt, Sample

_SIGNS = {"+": 1.0, "-": 0.0}


@dataclass(frozen=True, slots=True, eq=False)
class LabelledSteps:
    """Responses with labels of their steps."""

    samples: list[Sample]
    labels: list[Floats]
    """[T] per sample: at the token that ends a step, the probability that the step is correct; NaN elsewhere."""

    def __post_init__(self) -> None:
        if [len(sample.tokens) for sample in self.samples] != [len(row) for row in self.labels]:
            raise ValueError("labels of steps need a value for each token of their samples")

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPrompt(Prompt):
    """A prompt with its response, and [T] the labels of the response's steps."""

    sample: Sample
    labels: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepQuestion(Question):
    labels: tuple[float, ...]


class StepStream(PromptStream):
    """Endless stream of rows with a response and labels of its steps; see `PromptStream`. Its prompts are
    `StepPrompt`s.

    `requirements.step_separator` is set. The response is a text, or a list of steps. A row is dropped if it has another
    number of labels than of steps, or a label that is no probability.
    """

    @cached_property
    def _boundaries(self) -> StepBoundaries:
        return StepBoundaries(self._processor, self._separator, flag="rm.process_separator")

    @property
    def _separator(self) -> str:
        assert self._requirements.step_separator is not None, "steps require requirements.step_separator"
        return self._requirements.step_separator

    def _question(self, index: RowIndex, row: Mapping[str, Any]) -> Question:
        keys = self._keys[index.source]
        column, response = keys["label_key"], value_at(row, keys["output_key"])
        labels = read_step_labels(value_at(row, column), column)
        if isinstance(response, list | tuple) and all(isinstance(step, str) for step in response):
            row = {**row, str(keys["output_key"]): self._separator.join(response)}
        question = super()._question(index, row)
        fields = {name: getattr(question, name) for name in Question.__dataclass_fields__}
        return _StepQuestion(**fields, labels=labels)

    def _label(self, index: RowIndex, row: Mapping[str, Any]) -> None:
        """The labels of steps are no expected response."""

    def _prompt(
        self, index: int, name: str, question: Question, media: Sequence[InlineMedia], shared: dict[str, Media]
    ) -> StepPrompt:
        assert isinstance(question, _StepQuestion)
        assert question.answer is not None
        prompt = super()._prompt(index, name, question, media, shared)
        with unusable_on_error("response unusable"):
            check_response(question.answer, has_images=bool(prompt.media))
            sample = sft_sample(prompt, question.answer, self._processor)
        length = len(sample.tokens)
        if length > self._columns.max_len:
            raise UnusableError("too long", f"{length} tokens with a response, data.max_len is {self._columns.max_len}")
        ends = self._boundaries.ends(sample)
        if int(ends.sum()) != len(question.labels):
            where = "" if self._separator in question.answer else "; it has no rm.process_separator"
            raise UnusableError(
                "labels do not fit the steps", f"{len(question.labels)} labels for {int(ends.sum())} steps{where}"
            )
        labels = np.full(length, np.nan, dtype=np.float32)
        labels[ends] = question.labels
        fields = {field: getattr(prompt, field) for field in Prompt.__dataclass_fields__}
        return StepPrompt(**fields, sample=sample, labels=labels)


def read_step_labels(value: Any, column: str | None) -> tuple[float, ...]:
    """Return labels of steps as probabilities: booleans, `+` and `-`, or numbers from 0 to 1, in a list or its JSON.

    One boolean is the label of a response of one step. Raises UnusableError.
    """
    if isinstance(value, bool):
        value = [value]
    elif isinstance(value, str):  # a list in a file of text columns
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list | tuple) or not value:
        raise UnusableError("step labels unusable", f"column {column!r} (data.label_key) holds no list of labels")
    labels = []
    for number, label in enumerate(value, start=1):
        given = _SIGNS.get(label, label) if isinstance(label, str) else label
        if not isinstance(given, bool | int | float) or not 0.0 <= given <= 1.0:
            raise UnusableError(
                "step labels unusable",
                f"label {number} of column {column!r} (data.label_key) is {label!r}, not true, false, or a probability",
            )
        labels.append(float(given))
    return tuple(labels)


def collate_steps(prompts: Sequence[Prompt]) -> LabelledSteps:
    """Number the responses of a batch."""
    samples, labels = [], []
    for number, prompt in enumerate(prompts):
        assert isinstance(prompt, StepPrompt), "steps require requirements.step_separator"
        samples.append(replace(prompt.sample, group=number))
        labels.append(prompt.labels)
    return LabelledSteps(samples, labels)
