"""Lay samples out in the [B, T] tensors of one forward pass, and take per-token results apart again.

`padded` puts one sample in each row. `packed` puts all samples of a pack end to end in a single row. `shared` does the
same, but the prompt of a group lies there once, before its answers:

    padded   p p a a .     packed   p p a a p p b b b q q c     shared   p p a a b b b q q c
             p p b b b
             q q c . .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlmrl.errors import DataError
from vlmrl.types import Layout, Media, Sample

if TYPE_CHECKING:
    from torch import Tensor

FILLER = -1
"""The id of a sample that nobody asked about."""


class Branch(NamedTuple):
    """Samples that begin alike: what they share lies once, then each one's own tokens, in this order."""

    members: tuple[int, ...]
    prefix: int
    """How many first tokens they share; 0 for a sample by itself."""


class Segment(NamedTuple):
    """A run of tokens that lie together: tokens `first` to `last` of a sample, from place `start` of a row on."""

    row: int
    start: int
    sample: int
    first: int
    last: int
    parent: int | None
    """Number of the segment that it continues; None when it starts a sample."""

    @property
    def place(self) -> tuple[int, slice]:
        """Where it lies in a [B, T] array."""
        return self.row, slice(self.start, self.start + self.last - self.first)


@dataclass(frozen=True, eq=False)
class Pack:
    """What one forward pass eats."""

    samples: tuple[Sample, ...]
    rows: tuple[tuple[Branch, ...], ...]
    """`rows[b]`: what lies end to end in row b."""
    ids: tuple[int, ...]
    """Where each sample stood in the caller's batch; -1 is a filler that nobody asked about."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.samples):
            raise ValueError(f"a pack of {len(self.samples)} samples has {len(self.ids)} ids")
        held = sorted(i for row in self.rows for branch in row for i in branch.members)
        if held != list(range(len(self.samples))):
            raise ValueError(f"the rows of a pack must hold each of its {len(self.samples)} samples once: {self.rows}")

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Every run of tokens, row by row, in the order in which they lie; runs without tokens are left out."""
        found: list[Segment] = []
        for row, branches in enumerate(self.rows):
            start = 0
            for members, prefix in branches:
                parent = None
                if prefix:
                    parent = len(found)
                    found.append(Segment(row, start, members[0], 0, prefix, None))
                    start += prefix
                for i in members:
                    length = len(self.samples[i].tokens) - prefix
                    if length:
                        found.append(Segment(row, start, i, prefix, prefix + length, parent))
                    start += length
        return tuple(found)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T): rows, and the tokens of the longest row."""
        return len(self.rows), max(s.start + s.last - s.first for s in self.segments)

    @property
    def num_tokens(self) -> int:
        """Tokens that are laid out, without padding."""
        return sum(s.last - s.first for s in self.segments)

    @property
    def num_useful(self) -> int:
        """Tokens of its samples, each counted whole: what there would be to compute if nothing were shared."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def is_one_per_row(self) -> bool:
        """Each row is one sample."""
        return all(len(row) == 1 and len(row[0].members) == 1 for row in self.rows)

    @cached_property
    def media(self) -> dict[str, Media]:
        """Its images by content hash, each once."""
        return {item.hash: item for sample in self.samples for item in sample.media}


def make_pack(samples: Sequence[Sample], ids: Sequence[int], layout: Layout) -> Pack:
    """One pack of these samples, in this order.

    Raises DataError, for `shared`, when samples of one group do not begin alike, token for token and image for image.
    """
    alone = [Branch((i,), 0) for i in range(len(samples))]
    if layout == "padded":
        rows: tuple[tuple[Branch, ...], ...] = tuple((branch,) for branch in alone)
    elif layout == "packed":
        rows = (tuple(alone),)
    else:
        rows = (tuple(_branches(samples, ids)),)
    return Pack(tuple(samples), rows, tuple(ids))


def _branches(samples: Sequence[Sample], ids: Sequence[int]) -> list[Branch]:
    """Neighbours of the same group in one branch. What nobody asked about belongs to no group."""
    found: list[Branch] = []
    for i, sample in enumerate(samples):
        last = found[-1].members[0] if found else None
        if last is not None and FILLER not in (ids[i], ids[last]) and samples[last].group == sample.group:
            found[-1] = Branch((*found[-1].members, i), 0)
        else:
            found.append(Branch((i,), 0))
    return [branch._replace(prefix=_common([samples[i] for i in branch.members])) for branch in found]


def _common(members: Sequence[Sample]) -> int:
    """How many tokens the members share: those before the first that any of them sampled; 0 for a member by itself."""
    if len(members) == 1:
        return 0
    first = members[0]
    length = min(sample.prompt_length for sample in members)
    for other in members[1:]:
        differs = np.flatnonzero(first.tokens[:length] != other.tokens[:length])
        if len(differs):
            place = int(differs[0])
            raise DataError(
                f"the answers to {_name(first)} do not share its prompt: at token {place} of {length}, one has "
                f"{first.tokens[place]} and another {other.tokens[place]}; other prompts belong to other groups"
            )
        if [item.hash for item in first.media] != [item.hash for item in other.media]:
            raise DataError(f"the answers to {_name(first)} do not share its images: give them another group")
    return length


def _name(sample: Sample) -> str:
    return sample.source or f"prompt {sample.group} of the batch"


def place(pack: Pack, columns: Sequence[NDArray[Any]], fill: float) -> Tensor:
    """Lay one array per sample, each [T of the sample], out like the tokens: [B, T], `fill` where no token is.

    Of tokens that samples share, the first sample's values are taken. The tensor has the arrays' own type. Raises
    ValueError when the arrays do not line up with the samples.
    """
    import torch

    if [len(column) for column in columns] != [len(sample.tokens) for sample in pack.samples]:
        raise ValueError("the arrays to place do not line up with the samples of the pack")
    out = np.full(pack.shape, fill, dtype=columns[0].dtype)
    for segment in pack.segments:
        out[segment.place] = columns[segment.sample][segment.first : segment.last]
    return torch.from_numpy(out)


def collect(pack: Pack, values: Tensor) -> list[NDArray[Any]]:
    """Take [B, T] apart into one array per sample, in the order of `pack.samples`; the inverse of `place`."""
    array = values.detach().cpu().numpy()
    found = [np.zeros(len(sample.tokens), dtype=array.dtype) for sample in pack.samples]
    for segment in pack.segments:
        found[segment.sample][segment.first : segment.last] = array[segment.place]
    for row in pack.rows:
        for members, prefix in row:
            for i in members[1:]:
                found[i][:prefix] = found[members[0]][:prefix]
    return found


ImageCost = Callable[[Media], float]
"""What an image costs a pass, in language tokens."""


def weigh(samples: Sequence[Sample], layout: Layout, image_cost: ImageCost) -> float:
    """The cost of one pass over these samples in one pack: its tokens, padding included, and each image once."""
    if not samples:
        return 0.0
    lengths = [len(sample.tokens) for sample in samples]
    if layout == "padded":
        tokens = len(lengths) * max(lengths)
    else:
        tokens = sum(lengths) - (_saved(samples) if layout == "shared" else 0)
    images = {item.hash: item for sample in samples for item in sample.media}
    return tokens + sum(image_cost(item) for item in images.values())


def _saved(samples: Sequence[Sample]) -> int:
    """Tokens that lie once instead of once per sample."""
    saved = 0
    for _, run in groupby(samples, key=lambda sample: sample.group):
        members = list(run)
        saved += (len(members) - 1) * min(sample.prompt_length for sample in members)
    return saved


def units(samples: Sequence[Sample], finest: Literal["image", "group", "sample"]) -> list[list[int]]:
    """Indices of what had better stay in one pack, in the order of the first of each.

    `image`: samples that see the same images, or answer the same prompt; `group`: the same prompt; `sample`: each
    by itself.
    """
    found: dict[object, list[int]] = {}
    for i, sample in enumerate(samples):
        if finest == "sample":
            key: object = i
        elif finest == "image" and sample.media:
            key = tuple(item.hash for item in sample.media)
        else:
            key = sample.group
        found.setdefault(key, []).append(i)
    return [sorted(members, key=lambda i: (samples[i].group, i)) for members in found.values()]


def cut(
    samples: Sequence[Sample],
    ids: Sequence[int],
    *,
    layout: Layout,
    max_tokens: int,
    max_samples: int | None,
    image_cost: ImageCost,
) -> list[Pack]:
    """Cut samples into packs whose cost stays within `max_tokens` and whose number stays within `max_samples`.

    What sees the same images stays together, else at least the answers of a group, as far as the budget lets them. A
    sample that is over the budget by itself gets its own pack.
    """
    packs: list[list[int]] = [[]]

    def fits(members: list[int]) -> bool:
        is_few = max_samples is None or len(members) <= max_samples
        return is_few and weigh([samples[i] for i in members], layout, image_cost) <= max_tokens

    def add(unit: list[int], finer: tuple[Literal["group", "sample"], ...]) -> None:
        if fits(packs[-1] + unit):
            packs[-1] = packs[-1] + unit
        elif fits(unit) or len(unit) == 1:
            packs.append(unit)
        else:
            for part in units([samples[i] for i in unit], finer[0]):
                add([unit[k] for k in part], finer[1:])

    for unit in units(samples, "image"):
        add(unit, ("group", "sample"))
    return [make_pack([samples[i] for i in pack], [ids[i] for i in pack], layout) for pack in packs if pack]
