"""Find duplicate training rows, and evaluation rows that are also training rows, by content."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vlmrl.data.digests import RowHasher

_LIMIT_S = 5.0
"""Seconds for all training rows of a run, and again for its evaluation rows: the start of a run waits for them."""
_MAX_ROWS = 200_000
"""Training rows whose digests are kept, about 300 bytes each."""
_MAX_NAMED = 3


class Duplicates(NamedTuple):
    """Duplicates among the rows that were compared."""

    num_rows: int
    """Training rows that were compared."""
    is_all: bool
    """Whether these are all training rows."""
    in_training: list[tuple[str, str]]
    """(training row, earlier training row with the same question and images)"""
    in_evaluation: list[tuple[str, str]]
    """(evaluation row, training row with the same question and images)"""

    def lines(self) -> list[str]:
        """Format one line per kind of duplicate."""
        where = f"the {'' if self.is_all else 'first '}{self.num_rows} training rows"
        lines = []
        if self.in_training:
            lines.append(f"data: {len(self.in_training)} of {where} repeat an earlier one: {_format(self.in_training)}")
        if self.in_evaluation:
            lines.append(
                f"data: {len(self.in_evaluation)} evaluation rows are among {where}, so their scores do not measure "
                f"generalisation: {_format(self.in_evaluation)}"
            )
        return lines


def find_duplicates(training: Sequence[RowHasher], evaluation: Sequence[RowHasher]) -> Duplicates:
    """Compare the questions and images of all rows, ignoring labels, within the time limit; training rows come first.

    Generated rows are skipped: their splits share no question, and small families repeat questions by design.
    """
    deadline = time.monotonic() + _LIMIT_S
    first_row: dict[tuple[str, str], str] = {}
    in_training = []
    num_rows = 0
    for name, content in _contents(training):
        if time.monotonic() > deadline or num_rows >= _MAX_ROWS:
            break
        num_rows += 1
        if content is None:
            continue
        if (earlier := first_row.setdefault(content, name)) != name:
            in_training.append((name, earlier))
    # Evaluation rows are few; a separate limit ensures that they are compared despite many training rows.
    deadline = time.monotonic() + _LIMIT_S
    in_evaluation = []
    for name, content in _contents(evaluation):
        if time.monotonic() > deadline:
            break
        if content is not None and content in first_row:
            in_evaluation.append((name, first_row[content]))
    num_all = sum(len(hasher.rows) for hasher in training if not hasher.rows.is_generated)
    return Duplicates(num_rows, num_rows >= num_all, in_training, in_evaluation)


def _contents(sources: Sequence[RowHasher]) -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Yield (row name, digests of its question and images) of every row; None for a row that cannot be read."""
    for hasher in sources:
        for row in range(0 if hasher.rows.is_generated else len(hasher.rows)):
            digest = hasher.digest(row)
            yield hasher.rows.row_name(row), None if digest is None else (digest.question, digest.images)


def _format(pairs: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(pairs) - _MAX_NAMED} more" if len(pairs) > _MAX_NAMED else ""
    return ", ".join(f"{row} = {same}" for row, same in pairs[:_MAX_NAMED]) + more
