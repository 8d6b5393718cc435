"""Find duplicate training rows, and evaluation rows whose prompts are also trained on, by content."""

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


RowContent = tuple[str, str]
"""Digests of a row's question and of its images."""


class Duplicates(NamedTuple):
    """Duplicates among the rows that were compared."""

    num_rows: int
    """Training rows that were compared."""
    is_all: bool
    """Whether these are all training rows."""
    in_training: list[tuple[str, str]]
    """(training row, earlier training row with the same question and images; of pairs, with the same responses)"""
    in_evaluation: list[tuple[str, str]]
    """(evaluation row, first training row with the same prompt: question and images, whatever the responses)"""

    def lines(self) -> list[str]:
        """Format one line per kind of duplicate."""
        where = f"the {'' if self.is_all else 'first '}{self.num_rows} training rows"
        lines = []
        if self.in_training:
            lines.append(f"data: {len(self.in_training)} of {where} repeat an earlier one: {_format(self.in_training)}")
        if self.in_evaluation:
            lines.append(
                f"data: {len(self.in_evaluation)} evaluation rows have prompts of {where}, so their scores do not "
                f"measure generalisation: {_format(self.in_evaluation)}"
            )
        return lines


def find_duplicates(training: Sequence[RowHasher], evaluation: Sequence[RowHasher]) -> Duplicates:
    """Compare all rows, ignoring labels, within the time limit; training rows come first.

    Generated rows are skipped: neither their splits nor a held-out part shares a question with the rows trained on, and
    small families repeat questions by design.
    """
    deadline = time.monotonic() + _LIMIT_S
    first_row: dict[RowContent, str] = {}
    first_row_of_prompt: dict[str, str] = {}
    in_training = []
    num_rows = 0
    for hasher, row in _rows(training):
        if time.monotonic() > deadline or num_rows >= _MAX_ROWS:
            break
        num_rows += 1
        name, digest, prompt = hasher.rows.row_name(row), hasher.digest(row), hasher.prompt(row)
        if prompt is not None:
            first_row_of_prompt.setdefault(prompt, name)
        if digest is None:
            continue
        if (earlier := first_row.setdefault((digest.question, digest.images), name)) != name:
            in_training.append((name, earlier))
    # Evaluation rows are few; a separate limit ensures that they are compared despite many training rows.
    deadline = time.monotonic() + _LIMIT_S
    in_evaluation = []
    for hasher, row in _rows(evaluation):
        if time.monotonic() > deadline:
            break
        prompt = hasher.prompt(row)
        if prompt in first_row_of_prompt:
            in_evaluation.append((hasher.rows.row_name(row), first_row_of_prompt[prompt]))
    num_all = sum(len(hasher.rows) for hasher in training if not hasher.rows.is_generated)
    return Duplicates(num_rows, num_rows >= num_all, in_training, in_evaluation)


def _rows(sources: Sequence[RowHasher]) -> Iterator[tuple[RowHasher, int]]:
    """Yield every row that is not generated."""
    return ((hasher, row) for hasher in sources if not hasher.rows.is_generated for row in range(len(hasher.rows)))


def _format(pairs: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(pairs) - _MAX_NAMED} more" if len(pairs) > _MAX_NAMED else ""
    return ", ".join(f"{row} = {same}" for row, same in pairs[:_MAX_NAMED]) + more
