"""Order of rows in the endless stream: shuffled by a seed, sources mixed by shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vlmrl.types import Ints

_BLOCK = 1024
# Random streams of the pooled order and of the choice of sources; the sources' own streams are 0, 1, 2, ...
_POOL = 2**31
_CHOICES = 2**31 + 1


class RowIndex(NamedTuple):
    """A row, by the index of its source and its index in the source."""

    source: int
    row: int


class RowOrder:
    """The k-th row of the stream for any k: a pure function of the sizes, the shares and the seed."""

    def __init__(self, sizes: Sequence[int], probs: Sequence[float] | None, seed: int) -> None:
        self._sizes = list(sizes)
        self._shares = None if probs is None else [p / sum(probs) for p in probs]
        self._seed = seed
        self._starts = np.cumsum([0, *sizes])
        self._permutations: dict[int, tuple[int, Ints]] = {}
        # Source of each draw, in blocks, and the number of draws from each source before the block.
        self._blocks: list[Ints] = []
        self._taken_before: list[Ints] = [np.zeros(len(sizes), dtype=np.int64)]

    def settings(self) -> dict[str, Any]:
        return {"shares": self._shares, "seed": self._seed}

    def at(self, k: int) -> RowIndex:
        if self._shares is None:
            pooled = self._row(_POOL, int(self._starts[-1]), k)
            source = int(np.searchsorted(self._starts, pooled, side="right")) - 1
            return RowIndex(source, pooled - int(self._starts[source]))
        block, offset = divmod(k, _BLOCK)
        while len(self._blocks) <= block:
            rng = self._rng(_CHOICES, len(self._blocks))
            choices = rng.choice(len(self._sizes), size=_BLOCK, p=self._shares)
            self._blocks.append(choices)
            self._taken_before.append(self._taken_before[-1] + np.bincount(choices, minlength=len(self._sizes)))
        source = int(self._blocks[block][offset])
        taken = self._taken_before[block][source] + np.count_nonzero(self._blocks[block][:offset] == source)
        return RowIndex(source, self._row(source, self._sizes[source], int(taken)))

    def _row(self, stream: int, size: int, k: int) -> int:
        """Return the k-th row of a stream that permutes `size` rows anew in every episode."""
        episode, offset = divmod(k, size)
        if self._permutations.get(stream, (-1,))[0] != episode:
            self._permutations[stream] = (episode, self._rng(stream, episode).permutation(size))
        return int(self._permutations[stream][1][offset])

    def _rng(self, stream: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed % 2**63, stream, number])
