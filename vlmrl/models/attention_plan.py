"""Which tokens look at which: the attention of packed samples, branches and images, as batches of dense calls.

A span is a run of tokens that see each other; an answer's span has its prompt's for a parent, and sees all of that too.
What a token sees is then cut in two: its own span up to itself, and its parent, whole. Neither needs a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlmrl.types import Bools, Ints


class Span(NamedTuple):
    """Tokens that lie together, in the rows of a pack laid end to end."""

    start: int
    length: int
    parent: int | None = None
    """Number of the span whose tokens come before these; it has no parent itself."""


class Rows:
    """Some rows of a flat tensor [T, ...] on CPU, as a batch [n, m, ...]."""

    def __init__(self, rows: Ints) -> None:
        self.shape = rows.shape
        flat = rows.ravel()
        # Neighbours in order need no copy, and no index.
        is_run = bool((np.diff(flat) == 1).all())
        self._run = slice(int(flat[0]), int(flat[-1]) + 1) if is_run else None
        self._index = torch.from_numpy(flat)

    def take(self, flat: Tensor) -> Tensor:
        """[T, ...] -> [n, m, ...]"""
        if self._run is not None:
            return flat[self._run].reshape(*self.shape, *flat.shape[1:])
        return flat.index_select(0, self._index).reshape(*self.shape, *flat.shape[1:])

    def add(self, flat: Tensor, values: Tensor) -> None:
        """Add [n, m, ...] to the rows, in place; a row that occurs twice receives both."""
        values = values.reshape(-1, *flat.shape[1:])
        if self._run is not None:
            flat[self._run] += values
        else:
            flat.index_add_(0, self._index, values)

    def put(self, flat: Tensor, values: Tensor) -> None:
        """Write [n, m, ...] into the rows, in place; no row may occur twice."""
        values = values.reshape(-1, *flat.shape[1:])
        if self._run is not None:
            flat[self._run] = values
        else:
            flat.index_copy_(0, self._index, values)


class Look(NamedTuple):
    """A batch of n calls of the same shape: m queries look at k keys."""

    queries: Rows
    """[n, m]; behind a short one its last token stands in for what is missing."""
    keys: Rows
    """[n, k]"""
    causal: bool
    own: Rows
    """The queries that are no stand-ins, [1, number of them]."""
    is_own: Tensor | None
    """[n * m] False on stand-ins; None when there are none."""

    def without_stand_ins(self, values: Tensor) -> Tensor:
        """[n, m, ...] -> [number of queries, ...]"""
        flat = values.flatten(0, 1)
        return flat if self.is_own is None else flat[self.is_own]


@dataclass(frozen=True, eq=False)
class Plan:
    """All that the attention must know of a pack, whichever kernel does it."""

    spans: tuple[Span, ...]
    """They cover the rows laid end to end, in order."""
    own: tuple[Look, ...]
    """Each token looks at its own span."""
    before: tuple[Look, ...]
    """Tokens of spans with a parent look at it."""
    causal: bool

    @property
    def length(self) -> int:
        """Tokens of all rows, padding included."""
        return self.spans[-1].start + self.spans[-1].length


@lru_cache(maxsize=64)
def plan(spans: tuple[Span, ...], *, causal: bool) -> Plan:
    """The calls for these spans; they are the same in every layer, and for images of the same sizes in every step."""
    return Plan(spans, tuple(_own(spans, causal)), tuple(_before(spans)), causal)


def spans_of(lengths: Sequence[int]) -> tuple[Span, ...]:
    """Spans without parents, end to end."""
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return tuple(Span(start, length) for start, length in zip(starts, lengths, strict=True))


def key_rows(spans: Sequence[Span]) -> tuple[Ints, list[int]]:
    """For kernels that take queries and keys of different lengths: the rows of every span's keys, parent first, span
    after span; and how many keys each span has.
    """
    rows, lengths = [], []
    for span in spans:
        before = spans[span.parent] if span.parent is not None else Span(0, 0)
        rows += [_range(before), _range(span)]
        lengths.append(before.length + span.length)
    return np.concatenate(rows), lengths


def _range(span: Span) -> Ints:
    return np.arange(span.start, span.start + span.length)


def _own(spans: Sequence[Span], causal: bool) -> list[Look]:
    """Spans of about the same length at a time. A causal token never looks at the stand-ins behind a short span; where
    tokens look ahead, only equal lengths go together.
    """
    buckets: dict[int, list[Span]] = {}
    for span in spans:
        buckets.setdefault((span.length - 1).bit_length() if causal else span.length, []).append(span)
    looks = []
    for alike in buckets.values():
        queries, is_own = _batch([_range(span) for span in alike])
        looks.append(_look(queries, queries, is_own, causal=causal))
    return looks


def _before(spans: Sequence[Span]) -> list[Look]:
    """All children of a parent are one call; parents of the same length, with about as many tokens below, a batch."""
    children: dict[int, list[Ints]] = {}
    for span in spans:
        if span.parent is not None:
            children.setdefault(span.parent, []).append(_range(span))
    buckets: dict[tuple[int, int], list[int]] = {}
    for parent, ranges in children.items():
        number = sum(map(len, ranges))
        buckets.setdefault((spans[parent].length, (number - 1).bit_length()), []).append(parent)
    looks = []
    for parents in buckets.values():
        queries, is_own = _batch([np.concatenate(children[parent]) for parent in parents])
        keys = np.stack([_range(spans[parent]) for parent in parents])
        looks.append(_look(queries, keys, is_own, causal=False))
    return looks


def _batch(ranges: list[Ints]) -> tuple[Ints, Bools]:
    """[n, m] of rows, the last of each standing in behind it; and which of them are no stand-ins."""
    lengths = np.array([len(rows) for rows in ranges])[:, None]
    offset = np.arange(lengths.max())
    return np.stack([rows[np.minimum(offset, len(rows) - 1)] for rows in ranges]), offset < lengths


def _look(queries: Ints, keys: Ints, is_own: Bools, *, causal: bool) -> Look:
    own = Rows(queries[is_own][None])
    mask = None if is_own.all() else torch.from_numpy(is_own.ravel())
    rows = Rows(queries)
    return Look(rows, rows if keys is queries else Rows(keys), causal, own, mask)
