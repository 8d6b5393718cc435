"""Hold out training rows for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmrl.data.rows import Rows, RowView
from vlmrl.errors import ConfigError
from vlmrl.types import Ints

_STREAM = 2**31 + 2
"""Stream of random numbers for the choice; `RowOrder` uses other streams of the same seed."""


def hold_out(sources: Sequence[Rows], fraction: float, *, seed: int) -> tuple[list[Rows], list[Rows]]:
    """Split each source into training rows and held-out rows; the split follows from the seed, and row order is kept.

    Both parts of a source have at least one row. Messages still name rows by their original numbers.

    Raises:
        ConfigError: a source has only one row.
    """
    kept, held = [], []
    for number, source in enumerate(sources):
        size = len(source)
        if size < 2:
            raise ConfigError(
                f"data.eval_fraction {fraction:g} cannot hold out a row of dataset {source.name}: it has only one"
            )
        count = min(max(1, round(size * fraction)), size - 1)
        order = np.random.default_rng([seed % 2**63, _STREAM, number]).permutation(size)
        held.append(_select(source, np.sort(order[:count])))
        kept.append(_select(source, np.sort(order[count:])))
    return kept, held


def _select(source: Rows, indices: Ints) -> Rows:
    numbers = indices if source.numbers is None else source.numbers[indices]
    return replace(source, rows=RowView(source.rows, indices=indices), numbers=numbers)
