"""Training rows that are kept for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from vlmrl.data.rows import Rows
from vlmrl.errors import ConfigError
from vlmrl.types import Ints

_STREAM = 2**31 + 2
"""The random numbers of the choice; `Order` has the other streams of a seed."""


def hold_out(sources: Sequence[Rows], fraction: float, *, seed: int) -> tuple[list[Rows], list[Rows]]:
    """The sources without a share of their rows, and that share of each: the same ones for a seed, in their order.

    Each source gives at least one row and keeps at least one. Rows keep their numbers in messages. Raises ConfigError
    for a source of one row.
    """
    kept, held = [], []
    for number, source in enumerate(sources):
        size = len(source)
        if size < 2:
            raise ConfigError(
                f"data.eval_fraction {fraction:g} cannot hold out a row of dataset {source.name}: it has one"
            )
        count = min(max(1, round(size * fraction)), size - 1)
        order = np.random.default_rng([seed % 2**63, _STREAM, number]).permutation(size)
        held.append(_chosen(source, np.sort(order[:count])))
        kept.append(_chosen(source, np.sort(order[count:])))
    return kept, held


def _chosen(source: Rows, indices: Ints) -> Rows:
    numbers = indices if source.numbers is None else source.numbers[indices]
    return replace(source, rows=_Chosen(source.rows, indices), numbers=numbers)


class _Chosen(Sequence[Mapping[str, Any]]):
    """Some rows of a sequence."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], indices: Ints) -> None:
        self._rows = rows
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._rows[int(self._indices[index])]
