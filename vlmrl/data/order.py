"""Order of rows in a stream, endless or of some episodes: shuffled by a seed, sources mixed by shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vlmrl.errors import EndOfRowsError
from vlmrl.types import Ints

_BLOCK = 1024
# Random streams of the pooled order and of the choice of sources; the sources' own streams are 0, 1, 2, ...
_POOL = 2**31
_CHOICES = 2**31 + 1


class RowIndex(NamedTuple):
    """A row, by the index of its source and its index in the source."""

    source: int
    row: int


def end_of_rows(num_rows: int, *, num_dropped: int, left_out: int, size: int) -> EndOfRowsError:
    """Return the error of a stream of `num_rows` rows in which `left_out` are left, too few for a batch of `size`."""
    message = f"the {num_rows} rows of the data are read as often as train.max_epochs says"
    if num_dropped:
        message += f" ({num_dropped} of them are dropped)"
    if left_out:
        message += f"; the last {left_out} do not fill a batch of {size} and are left out"
    error = EndOfRowsError(message)
    error.left_out = left_out
    return error


class RowOrder:
    """The k-th row of the stream for any k: a pure function of the sizes, the shares and the seed."""

    def __init__(
        self, sizes: Sequence[int], probs: Sequence[float] | None, seed: int, episodes: int | None = None
    ) -> None:
        self._sizes = list(sizes)
        self._limit = None if episodes is None else episodes * sum(sizes)
        self._shares = None if probs is None else [p / sum(probs) for p in probs]
        self._seed = seed
        self._starts = np.cumsum([0, *sizes])
        self._permutations: dict[int, tuple[int, Ints]] = {}
        # Source of each draw, in blocks, and the number of draws from each source before the block.
        self._blocks: list[Ints] = []
        self._taken_before: list[Ints] = [np.zeros(len(sizes), dtype=np.int64)]

    def settings(self) -> dict[str, Any]:
        return {"shares": self._shares, "seed": self._seed}

    def take(self, start: int, count: int) -> list[RowIndex]:
        """Return the rows `start` to `start + count` of the stream; fewer at the end of its episodes."""
        end = start + count if self._limit is None else min(start + count, self._limit)
        return [self.at(k) for k in range(start, end)]

    def at(self, k: int) -> RowIndex:
        if self._shares is None:
            pooled = self._row(_POOL, int(self._starts[-1]), k)
            return self.in_order(pooled)
        block, offset = divmod(k, _BLOCK)
        while len(self._blocks) <= block:
            rng = self._rng(_CHOICES, len(self._blocks))
            choices = rng.choice(len(self._sizes), size=_BLOCK, p=self._shares)
            self._blocks.append(choices)
            self._taken_before.append(self._taken_before[-1] + np.bincount(choices, minlength=len(self._sizes)))
        source = int(self._blocks[block][offset])
        taken = self._taken_before[block][source] + np.count_nonzero(self._blocks[block][:offset] == source)
        return RowIndex(source, self._row(source, self._sizes[source], int(taken)))

    def in_order(self, position: int) -> RowIndex:
        """Return the row at a position of all sources behind each other, regardless of shares and seed."""
        source = int(np.searchsorted(self._starts, position, side="right")) - 1
        return RowIndex(source, position - int(self._starts[source]))

    def _row(self, stream: int, size: int, k: int) -> int:
        """Return the k-th row of a stream that permutes `size` rows anew in every episode."""
        episode, offset = divmod(k, size)
        if self._permutations.get(stream, (-1,))[0] != episode:
            self._permutations[stream] = (episode, self._rng(stream, episode).permutation(size))
        return int(self._permutations[stream][1][offset])

    def _rng(self, stream: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed % 2**63, stream, number])
