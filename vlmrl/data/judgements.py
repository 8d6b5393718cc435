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


def mismatched(samples: Sequence[Sample], *, max_len: int) -> list[Sample]:
    """Return the prompt of each sample with a response to another one, for the baseline of KTO, in `max_len` tokens.

    It is the response of the next sample if that fits, else of the first one behind it that does. Where none fits, that
    of the next sample is cut: a model is never given more tokens than the rows of its data have.

    Raises:
        ValueError: there is only one sample, or one is longer than `max_len`.
    """
    if len(samples) < 2:
        raise ValueError("a single response has no other prompt")
    if max(len(sample.tokens) for sample in samples) > max_len:
        raise ValueError(f"a sample is longer than {max_len} tokens")
    lengths = [len(sample.tokens) - sample.prompt_length for sample in samples]
    moved = []
    for number, sample in enumerate(samples):
        room = max_len - sample.prompt_length
        others = [(number + step) % len(samples) for step in range(1, len(samples))]
        other = samples[next((place for place in others if lengths[place] <= room), others[0])]
        behind = slice(other.prompt_length, other.prompt_length + room)
        tokens = np.concatenate([sample.tokens[: sample.prompt_length], other.tokens[behind]])
        sampled = np.concatenate([np.zeros(sample.prompt_length, dtype=np.bool_), other.sampled[behind]])
        moved.append(replace(sample, tokens=tokens, sampled=sampled, group=number, response=number))
    return moved


def _word(label: str) -> str:
    return label.strip().lower()
