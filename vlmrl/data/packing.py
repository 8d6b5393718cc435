"""Lay samples out in the [B, T] tensors of one forward pass, and take per-token results apart again.

`padded` puts one sample in each row. `packed` puts all samples of a pack end to end in a single row:

    padded   a a a .      packed   a a a b b b b c c
             b b b b
             c c . .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrl.types import Layout, Sample

if TYPE_CHECKING:
    from torch import Tensor

Cost = Callable[[Sample], int]
"""What a sample weighs in a budget: its language tokens plus its vision patches."""

FILLER = -1
"""The id of a sample that nobody asked about."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """What one forward pass eats."""

    samples: tuple[Sample, ...]
    rows: tuple[tuple[int, ...], ...]
    """`rows[b]`: which samples lie end to end in row b."""
    ids: tuple[int, ...]
    """Where each sample stood in the caller's batch; -1 is a filler that nobody asked about."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.samples):
            raise ValueError(f"a pack of {len(self.samples)} samples has {len(self.ids)} ids")
        if sorted(i for row in self.rows for i in row) != list(range(len(self.samples))):
            raise ValueError(f"the rows of a pack must hold each of its {len(self.samples)} samples once: {self.rows}")

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T): rows, and the tokens of the longest row."""
        return len(self.rows), max(sum(len(self.samples[i].tokens) for i in row) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of its samples, without padding."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def holds_media(self) -> bool:
        """Some sample has an image, so the vision tower will run."""
        return any(sample.media for sample in self.samples)


def make_pack(samples: Sequence[Sample], ids: Sequence[int], layout: Layout) -> Pack:
    """One pack of these samples, in this order."""
    everything = range(len(samples))
    rows = (tuple(everything),) if layout == "packed" else tuple((i,) for i in everything)
    return Pack(tuple(samples), rows, tuple(ids))


def place(pack: Pack, columns: Sequence[NDArray[Any]], fill: float) -> Tensor:
    """Lay one array per sample, each [T of the sample], out like the tokens: [B, T], `fill` where no token is.

    The tensor has the arrays' own type. Raises ValueError when the arrays do not line up with the samples.
    """
    import torch

    if [len(column) for column in columns] != [len(sample.tokens) for sample in pack.samples]:
        raise ValueError("the arrays to place do not line up with the samples of the pack")
    out = np.full(pack.shape, fill, dtype=columns[0].dtype)
    for i, where in enumerate(_spans(pack)):
        out[where] = columns[i]
    return torch.from_numpy(out)


def collect(pack: Pack, values: Tensor) -> list[NDArray[Any]]:
    """Take [B, T] apart into one array per sample, in the order of `pack.samples`; the inverse of `place`."""
    array = values.detach().cpu().numpy()
    return [array[where].copy() for where in _spans(pack)]


def _spans(pack: Pack) -> list[tuple[int, slice]]:
    spans: dict[int, tuple[int, slice]] = {}
    for b, row in enumerate(pack.rows):
        start = 0
        for i in row:
            end = start + len(pack.samples[i].tokens)
            spans[i] = (b, slice(start, end))
            start = end
    return [spans[i] for i in range(len(pack.samples))]


def cut(
    samples: Sequence[Sample],
    ids: Sequence[int],
    *,
    layout: Layout,
    max_tokens: int,
    max_samples: int | None,
    cost: Cost,
) -> list[Pack]:
    """Cut samples into packs whose cost stays within `max_tokens` and whose number stays within `max_samples`.

    Order is kept, so that the answers of a group, which share their images, stay together. Padding counts: a padded
    pack costs its rows times its longest sample, plus the patches. A sample that is over the budget by itself gets its
    own pack.
    """
    packs: list[Pack] = []
    held: list[int] = []
    weight = longest = 0
    for i, sample in enumerate(samples):
        length = len(sample.tokens)
        extra = cost(sample) - (0 if layout == "packed" else length)
        padded = 0 if layout == "packed" else max(longest, length) * (len(held) + 1)
        is_full = max_samples is not None and len(held) == max_samples
        if held and (is_full or weight + extra + padded > max_tokens):
            packs.append(make_pack([samples[j] for j in held], [ids[j] for j in held], layout))
            held, weight, longest = [], 0, 0
        held.append(i)
        weight += extra
        longest = max(longest, length)
    if held:
        packs.append(make_pack([samples[j] for j in held], [ids[j] for j in held], layout))
    return packs
