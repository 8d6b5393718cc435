"""Rows that come twice, and evaluation rows among the training rows, by their content."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vlmrl.data.marks import Marked

_LIMIT_S = 5.0
"""For all rows of a run together: a start waits for it."""
_MOST_ROWS = 200_000
"""Of which marks are kept, some 300 bytes each."""
_MOST_NAMED = 3


class Repeats(NamedTuple):
    """What was found among the rows that were looked at."""

    num_rows: int
    """Training rows that were looked at."""
    is_all: bool
    """They are all that there are."""
    twice: list[tuple[str, str]]
    """Training rows, and the earlier ones with the same question and images."""
    evaluated: list[tuple[str, str]]
    """Evaluation rows, and the training rows with the same question and images."""

    def lines(self) -> list[str]:
        """For people, one for each kind that there is."""
        where = f"the {'' if self.is_all else 'first '}{self.num_rows} training rows"
        found = []
        if self.twice:
            found.append(f"data: {len(self.twice)} of {where} repeat an earlier one: {_named(self.twice)}")
        if self.evaluated:
            found.append(
                f"data: {len(self.evaluated)} evaluation rows are among {where}, so that the evaluation says nothing "
                f"of them: {_named(self.evaluated)}"
            )
        return found


def find_repeats(training: Sequence[Marked], evaluation: Sequence[Marked]) -> Repeats:
    """Compare the questions and images of all rows, labels aside, for as long as there is time: training rows first.

    Generated rows are left out. Their splits share no question, and a small family of questions comes again by design.
    """
    deadline = time.monotonic() + _LIMIT_S
    kept: dict[tuple[str, str], str] = {}
    twice = []
    looked_at = 0
    for name, content in _asked(training):
        if time.monotonic() > deadline or looked_at >= _MOST_ROWS:
            break
        looked_at += 1
        if content is None:
            continue
        if (earlier := kept.setdefault(content, name)) != name:
            twice.append((name, earlier))
    # A time of their own: they are few, and found however many training rows there are.
    deadline = time.monotonic() + _LIMIT_S
    evaluated = []
    for name, content in _asked(evaluation):
        if time.monotonic() > deadline:
            break
        if content is not None and content in kept:
            evaluated.append((name, kept[content]))
    num_all = sum(len(marked.rows) for marked in training if not marked.rows.is_generated)
    return Repeats(looked_at, looked_at >= num_all, twice, evaluated)


def _asked(sources: Sequence[Marked]) -> Iterator[tuple[str, tuple[str, str] | None]]:
    """(row, marks of its question and images) of every row; None for what cannot be read."""
    for marked in sources:
        for row in range(0 if marked.rows.is_generated else len(marked.rows)):
            mark = marked.mark(row)
            yield marked.rows.row_name(row), None if mark is None else (mark.question, mark.images)


def _named(pairs: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(pairs) - _MOST_NAMED} more" if len(pairs) > _MOST_NAMED else ""
    return ", ".join(f"{one} = {other}" for one, other in pairs[:_MOST_NAMED]) + more
