"""Right and subtly wrong solutions of generated questions, as rows for preferences and for process rewards."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from vlmrl.errors import ConfigError

KINDS = ("pairs", "unpaired", "steps")
SEPARATOR = "\n\n"
"""Text between two steps: the default of `reward.process_separator`."""


class Solution(NamedTuple):
    """A solution of a question, right or wrong."""

    steps: tuple[str, ...]
    """The way to the answer."""
    answer: str
    size: int
    """By which answers are ordered: the number, or the minutes of a time."""


class Wrong(NamedTuple):
    """A wrong solution, which follows from one mistake."""

    error: str
    """Its mistake: `off by one`."""
    solution: Solution


class Wording(NamedTuple):
    """The form of rows, equal for right and wrong responses."""

    kind: str = "pairs"
    is_worked: bool = False
    """Responses show the steps; else they are the answer alone."""
    boxed: bool = False
    separator: str = SEPARATOR

    def check(self, dataset: str) -> None:
        """Raise ConfigError for an option out of range. `dataset` is for messages."""
        if self.kind not in KINDS:
            raise ConfigError(f"{dataset}?kind={self.kind}: choose among {', '.join(KINDS)}")

    def response(self, solution: Solution) -> str:
        """Write a solution as a response."""
        return self.separator.join(self._steps(solution))

    def step_labels(self, right: Solution, solution: Solution) -> list[int]:
        """Label every step of a response: 1 up to the first step that differs from the right solution, then 0.

        The steps after a mistake follow from it.
        """
        pairs = list(zip(self._steps(right), self._steps(solution), strict=True))
        same = [step == right_step for right_step, step in pairs]
        num_right = same.index(False) if False in same else len(same)
        return [1] * num_right + [0] * (len(same) - num_right)

    def _steps(self, solution: Solution) -> list[str]:
        answer = f"\\boxed{{{solution.answer}}}" if self.boxed else solution.answer
        return [*solution.steps, f"The answer is {answer}."] if self.is_worked else [answer]


def pick_wrong(
    rng: random.Random, right: Solution, candidates: Iterable[Wrong], *, within: tuple[int, int]
) -> Wrong | None:
    """Draw a wrong solution whose answer differs from the right one and lies in the range of right answers; or None.

    First draws whether its answer is larger or smaller, where both exist: else small numbers, which are shorter, would
    mostly be wrong.
    """
    low, high = within
    plausible = [wrong for wrong in candidates if low <= wrong.solution.size <= high]
    larger = [wrong for wrong in plausible if wrong.solution.size > right.size]
    smaller = [wrong for wrong in plausible if wrong.solution.size < right.size]
    sides = [side for side in (larger, smaller) if side]
    return rng.choice(rng.choice(sides)) if sides else None


def preference_columns(rng: random.Random, right: Solution, wrong: Wrong, wording: Wording) -> dict[str, Any]:
    """Return the columns of a row that hold responses and labels.

    * `pairs`: `chosen`, `rejected`, and `label`, the right answer.
    * `unpaired`: `response`, right or wrong with equal probability; `label`, whether it is right; `expected`, the right
      answer.
    * `steps`: `response`, `labels` of its steps (1 or 0), and `label`, the right answer.

    `error` names the mistake of the wrong response, and is empty in rows without one.
    """
    if wording.kind == "pairs":
        responses = {"chosen": wording.response(right), "rejected": wording.response(wrong.solution)}
        return {**responses, "label": right.answer, "error": wrong.error}
    is_right = rng.random() < 0.5
    solution = right if is_right else wrong.solution
    error = "" if is_right else wrong.error
    if wording.kind == "unpaired":
        return {"response": wording.response(solution), "label": is_right, "expected": right.answer, "error": error}
    labels = wording.step_labels(right, solution)
    return {"response": wording.response(solution), "labels": labels, "label": right.answer, "error": error}
