"""Rows with one response and a label that says whether it is desirable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlmrl.errors import DataError
from vlmrl.types import Bools, Prompt, Sample

_WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Text of a label -> whether the response is desirable."""


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """N responses to different prompts."""

    samples: list[Sample]
    """Sample i is of `group` i and `response` i."""
    desirable: Bools
    """[N]"""

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.desirable):
            raise ValueError(f"{len(self.samples)} responses with {len(self.desirable)} labels")

    def __len__(self) -> int:
        return len(self.desirable)


def judgement_problems(labels: Sequence[str], *, limit_s: float | None = None) -> list[str | None]:
    """Return why each label cannot be used; None for one that says whether its response is desirable."""
    del limit_s  # it takes no time
    return [None if _word(label) in _WORDS else "it is neither true nor false" for label in labels]


def is_desirable(label: str) -> bool:
    """Whether a usable label says that its response is desirable."""
    return _WORDS[_word(label)]


def collate_judged(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Judged:
    """Join the samples of a batch with the labels of their prompts, and number them."""
    numbered = [replace(sample, group=number, response=number) for number, sample in enumerate(samples)]
    desirable = [prompt.label is not None and is_desirable(prompt.label) for prompt in prompts]
    return Judged(numbered, np.array(desirable, dtype=np.bool_))


def check_classes(labels: Sequence[str], *, column: str) -> None:
    """Raise DataError if all usable labels are of one class: there is nothing to tell apart."""
    classes = {_WORDS[_word(label)] for label in labels if _word(label) in _WORDS}
    if len(classes) == 1:
        word = "desirable" if classes.pop() else "undesirable"
        raise DataError(
            f"all of the {len(labels)} rows read are {word} by column {column!r} (data.label_key): dpo.loss kto needs "
            "desirable and undesirable responses"
        )


def mismatched(samples: Sequence[Sample]) -> list[Sample]:
    """Return the prompt of each sample with the response of the next one, for the baseline of KTO.

    Raises:
        ValueError: there is only one sample.
    """
    if len(samples) < 2:
        raise ValueError("a single response has no other prompt")
    moved = []
    for number, (sample, other) in enumerate(zip(samples, [*samples[1:], samples[0]], strict=True)):
        prompt, response = sample.tokens[: sample.prompt_length], other.tokens[other.prompt_length :]
        sampled = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), other.sampled[other.prompt_length :]])
        moved.append(
            replace(sample, tokens=np.concatenate([prompt, response]), sampled=sampled, group=number, response=number)
        )
    return moved


def _word(label: str) -> str:
    return label.strip().lower()
