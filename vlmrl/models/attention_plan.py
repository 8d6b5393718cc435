"""Attention over packed samples, shared prompts and images, planned as batches of dense calls without masks.

A span is a run of tokens that attend to each other. The span of a response has its prompt's span as its parent, and
attends to all of it. So each token's attention has two parts: its own span up to the token, and the whole parent.
Neither needs a mask. A span with blocks is cut at them, and its cuts attend to what is before them in a third part.
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
    """A run of tokens, in the rows of a pack laid end to end."""

    start: int
    length: int
    parent: int | None = None
    """Index of the span that precedes this one; a parent has no parent itself."""
    blocks: tuple[tuple[int, int], ...] = ()
    """(first token in the span, length) of runs whose tokens attend to each other in both directions, and to what is
    before them: images of Gemma 3."""


class Rows:
    """Some rows of a flat tensor [T, ...] on CPU, as a batch [n, m, ...]."""

    def __init__(self, rows: Ints) -> None:
        self.shape = rows.shape
        flat = rows.ravel()
        # Consecutive rows need no copy and no index.
        is_run = bool((np.diff(flat) == 1).all())
        self._run = slice(int(flat[0]), int(flat[-1]) + 1) if is_run else None
        self._index = torch.from_numpy(flat)

    def take(self, flat: Tensor) -> Tensor:
        """[T, ...] -> [n, m, ...]"""
        if self._run is not None:
            return flat[self._run].reshape(*self.shape, *flat.shape[1:])
        return flat.index_select(0, self._index).reshape(*self.shape, *flat.shape[1:])

    def add(self, flat: Tensor, values: Tensor) -> None:
        """Add [n, m, ...] to the rows, in place; rows may occur repeatedly."""
        values = values.reshape(-1, *flat.shape[1:])
        if self._run is not None:
            flat[self._run] += values
        else:
            flat.index_add_(0, self._index, values)

    def put(self, flat: Tensor, values: Tensor) -> None:
        """Write [n, m, ...] to the rows, in place; no row may occur twice."""
        values = values.reshape(-1, *flat.shape[1:])
        if self._run is not None:
            flat[self._run] = values
        else:
            flat.index_copy_(0, self._index, values)


class AttentionCall(NamedTuple):
    """A batch of n attention calls of the same shape, of m queries over k keys each."""

    queries: Rows
    """[n, m]; short ones are padded with their last token."""
    keys: Rows
    """[n, k]"""
    causal: bool
    outputs: Rows
    """The queries without padding, [1, number of them]."""
    is_real: Tensor | None
    """[n * m] False on padding; None if there is none."""

    def drop_padding(self, values: Tensor) -> Tensor:
        """[n, m, ...] -> [number of queries, ...]"""
        flat = values.flatten(0, 1)
        return flat if self.is_real is None else flat[self.is_real]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The attention of a pack, for any kernel."""

    spans: tuple[Span, ...]
    """They cover the rows laid end to end, in order."""
    within_spans: tuple[AttentionCall, ...]
    """Each token attends to its own span."""
    to_parents: tuple[AttentionCall, ...]
    """Tokens of spans with a parent attend to the parent."""
    causal: bool
    to_earlier: tuple[AttentionCall, ...] = ()
    """Of spans with blocks, which are cut at them: tokens of a cut attend to the span before the cut."""

    @property
    def has_blocks(self) -> bool:
        return any(span.blocks for span in self.spans)

    @property
    def length(self) -> int:
        """Tokens of all rows, padding included."""
        return self.spans[-1].start + self.spans[-1].length


@lru_cache(maxsize=64)
def plan_attention(spans: tuple[Span, ...], *, causal: bool) -> AttentionPlan:
    """Plan the calls for these spans. Cached: plans repeat in every layer, and for images of the same sizes in every
    step."""
    cuts = [cut for span in spans for cut in _cuts(span, causal)]
    return AttentionPlan(
        spans, tuple(_calls_within(cuts)), tuple(_calls_to_parents(spans)), causal, tuple(_calls_to_earlier(cuts))
    )


def spans_of(lengths: Sequence[int]) -> tuple[Span, ...]:
    """Make consecutive spans without parents."""
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return tuple(Span(start, length) for start, length in zip(starts, lengths, strict=True))


def key_rows(spans: Sequence[Span]) -> tuple[Ints, list[int]]:
    """Rows of every span's keys, parent first, span after span, and the number of keys of each span.

    For kernels that take queries and keys of different lengths.
    """
    rows, lengths = [], []
    for span in spans:
        before = spans[span.parent] if span.parent is not None else Span(0, 0)
        rows += [_range(before), _range(span)]
        lengths.append(before.length + span.length)
    return np.concatenate(rows), lengths


def _range(span: Span) -> Ints:
    return np.arange(span.start, span.start + span.length)


class _Cut(NamedTuple):
    """A part of a span, whose tokens attend to it and to all of the span before it."""

    start: int
    length: int
    causal: bool
    before: int
    """Tokens of the span before it."""


def _cuts(span: Span, causal: bool) -> list[_Cut]:
    """Cut a span into its blocks and the causal tokens around them."""
    cuts, done = [], 0
    for first, length in (*span.blocks, (span.length, 0)):
        cuts += [(done, first - done, causal), (first, length, False)]
        done = first + length
    return [_Cut(span.start + first, length, is_causal, first) for first, length, is_causal in cuts if length]


def _calls_within(cuts: Sequence[_Cut]) -> list[AttentionCall]:
    """Batch cuts of similar length. Causal tokens never attend to the padding behind a short one; without a causal
    mask, only cuts of equal length share a batch.
    """
    buckets: dict[tuple[bool, int], list[_Cut]] = {}
    for cut in cuts:
        key = (cut.length - 1).bit_length() if cut.causal else cut.length
        buckets.setdefault((cut.causal, key), []).append(cut)
    calls = []
    for (causal, _), bucket in buckets.items():
        queries, is_real = _batch([np.arange(cut.start, cut.start + cut.length) for cut in bucket])
        calls.append(_call(queries, queries, is_real, causal=causal))
    return calls


def _calls_to_earlier(cuts: Sequence[_Cut]) -> list[AttentionCall]:
    """Make a call of each cut that is not the first of its span."""
    calls = []
    for cut in cuts:
        if cut.before:
            queries, is_real = _batch([np.arange(cut.start, cut.start + cut.length)])
            keys = np.arange(cut.start - cut.before, cut.start)[None]
            calls.append(_call(queries, keys, is_real, causal=False))
    return calls


def _calls_to_parents(spans: Sequence[Span]) -> list[AttentionCall]:
    """Make one call of all children of a parent. Batch parents of equal length whose children have a similar number of
    tokens."""
    children: dict[int, list[Ints]] = {}
    for span in spans:
        if span.parent is not None:
            children.setdefault(span.parent, []).append(_range(span))
    buckets: dict[tuple[int, int], list[int]] = {}
    for parent, ranges in children.items():
        number = sum(map(len, ranges))
        buckets.setdefault((spans[parent].length, (number - 1).bit_length()), []).append(parent)
    calls = []
    for parents in buckets.values():
        queries, is_real = _batch([np.concatenate(children[parent]) for parent in parents])
        keys = np.stack([_range(spans[parent]) for parent in parents])
        calls.append(_call(queries, keys, is_real, causal=False))
    return calls


def _batch(ranges: list[Ints]) -> tuple[Ints, Bools]:
    """Stack rows as [n, m], each padded with its last; returns also the mask that is False on padding."""
    lengths = np.array([len(rows) for rows in ranges])[:, None]
    offset = np.arange(lengths.max())
    return np.stack([rows[np.minimum(offset, len(rows) - 1)] for rows in ranges]), offset < lengths


def _call(queries: Ints, keys: Ints, is_real: Bools, *, causal: bool) -> AttentionCall:
    outputs = Rows(queries[is_real][None])
    mask = None if is_real.all() else torch.from_numpy(is_real.ravel())
    rows = Rows(queries)
    return AttentionCall(rows, rows if keys is queries else Rows(keys), causal, outputs, mask)
