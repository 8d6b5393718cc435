"""Pack samples into the [B, T] tensors of one forward pass, and unpack per-token results.

`padded` puts one sample in each row. `packed` concatenates all samples of a pack in a single row. `shared` does the
same, but stores the prompt of a group once, before its responses:

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
"""Id of a filler sample, whose results are discarded."""


class Branch(NamedTuple):
    """Samples with a common prefix: the prefix is stored once, followed by the rest of each sample in this order."""

    members: tuple[int, ...]
    prefix: int
    """Length of the common prefix; 0 for a single sample."""


class Piece(NamedTuple):
    """Contiguous tokens: tokens `first` to `last` (exclusive) of a sample, at position `start` of a row."""

    row: int
    start: int
    sample: int
    first: int
    last: int
    parent: int | None
    """Index of the piece that it continues; None when it starts a sample."""

    @property
    def place(self) -> tuple[int, slice]:
        """Its index into a [B, T] array."""
        return self.row, slice(self.start, self.start + self.last - self.first)


@dataclass(frozen=True, eq=False)
class Pack:
    """The samples of one forward pass and their layout in rows."""

    samples: tuple[Sample, ...]
    rows: tuple[tuple[Branch, ...], ...]
    """`rows[b]`: the branches concatenated in row b."""
    ids: tuple[int, ...]
    """Index of each sample in the caller's batch; -1 for a filler."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.samples):
            raise ValueError(f"a pack of {len(self.samples)} samples has {len(self.ids)} ids")
        members = sorted(i for row in self.rows for branch in row for i in branch.members)
        if members != list(range(len(self.samples))):
            raise ValueError(f"the rows of a pack must hold each of its {len(self.samples)} samples once: {self.rows}")

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All non-empty pieces, row by row, in the order of their positions."""
        pieces: list[Piece] = []
        for row, branches in enumerate(self.rows):
            start = 0
            for members, prefix in branches:
                parent = None
                if prefix:
                    parent = len(pieces)
                    pieces.append(Piece(row, start, members[0], 0, prefix, None))
                    start += prefix
                for i in members:
                    length = len(self.samples[i].tokens) - prefix
                    if length:
                        pieces.append(Piece(row, start, i, prefix, prefix + length, parent))
                    start += length
        return tuple(pieces)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T): number of rows, and tokens of the longest row."""
        return len(self.rows), max(p.start + p.last - p.first for p in self.pieces)

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes, without padding."""
        return sum(p.last - p.first for p in self.pieces)

    @property
    def num_useful(self) -> int:
        """Tokens of all samples: those that would be computed if no prefix were shared."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def is_one_per_row(self) -> bool:
        """Whether each row holds one sample."""
        return all(len(row) == 1 and len(row[0].members) == 1 for row in self.rows)

    @property
    def owners(self) -> tuple[int, ...]:
        """Number of each sample's response in the pack."""
        numbers = {i: number for number, members in enumerate(by_response(self.samples)) for i in members}
        return tuple(numbers[i] for i in range(len(self.samples)))

    @cached_property
    def media(self) -> dict[str, Media]:
        """The distinct images of its samples, by content hash."""
        return {item.hash: item for sample in self.samples for item in sample.media}


def make_pack(samples: Sequence[Sample], ids: Sequence[int], layout: Layout) -> Pack:
    """Make one pack of these samples, in this order.

    Raises:
        DataError: with `shared`, samples of one group differ in the tokens or images of their prompt.
    """
    single = [Branch((i,), 0) for i in range(len(samples))]
    if layout == "padded":
        rows: tuple[tuple[Branch, ...], ...] = tuple((branch,) for branch in single)
    elif layout == "packed":
        rows = (tuple(single),)
    else:
        rows = (tuple(_branches(samples, ids)),)
    return Pack(tuple(samples), rows, tuple(ids))


def _branches(samples: Sequence[Sample], ids: Sequence[int]) -> list[Branch]:
    """Put samples that begin with the same prompt into one branch, if no other prompt is between them; fillers and
    samples with a rewritten history begin with none."""
    branches: list[Branch] = []
    last: int | None = None  # the branch of the last prompt
    for i, sample in enumerate(samples):
        has_prompt = sample.shares_prompt and ids[i] != FILLER
        if has_prompt and last is not None and samples[branches[last].members[0]].group == sample.group:
            branches[last] = Branch((*branches[last].members, i), 0)
            continue
        if has_prompt:
            last = len(branches)
        branches.append(Branch((i,), 0))
    return [branch._replace(prefix=_common_prefix([samples[i] for i in branch.members])) for branch in branches]


def _common_prefix(members: Sequence[Sample]) -> int:
    """Return the length of the common prefix: the tokens before the first sampled one of any; 0 for a single sample."""
    if len(members) == 1:
        return 0
    first = members[0]
    length = min(sample.prompt_length for sample in members)
    for other in members[1:]:
        differs = np.flatnonzero(first.tokens[:length] != other.tokens[:length])
        if len(differs):
            place = int(differs[0])
            raise DataError(
                f"the responses to {_name(first)} do not share its prompt: at token {place} of {length}, one has "
                f"{first.tokens[place]} and another {other.tokens[place]}; different prompts need different groups"
            )
        if [item.hash for item in first.prompt_media] != [item.hash for item in other.prompt_media]:
            raise DataError(
                f"the responses to {_name(first)} do not share its images: different images need different groups"
            )
    return length


def _name(sample: Sample) -> str:
    return sample.source or f"prompt {sample.group} of the batch"


def place(pack: Pack, columns: Sequence[NDArray[Any]], fill: float) -> Tensor:
    """Lay out one array per sample, each [T of the sample], like the tokens of the pack: [B, T], padded with `fill`.

    A shared prefix takes the values of the first sample. The dtype is that of the arrays.

    Raises:
        ValueError: the lengths of the arrays differ from those of the samples.
    """
    import torch

    if [len(column) for column in columns] != [len(sample.tokens) for sample in pack.samples]:
        raise ValueError("the lengths of the arrays to place differ from those of the samples of the pack")
    out = np.full(pack.shape, fill, dtype=columns[0].dtype)
    for piece in pack.pieces:
        out[piece.place] = columns[piece.sample][piece.first : piece.last]
    return torch.from_numpy(out)


def collect(pack: Pack, values: Tensor) -> list[NDArray[Any]]:
    """Split [B, T] into one array per sample, in the order of `pack.samples`; the inverse of `place`."""
    array = values.detach().cpu().numpy()
    columns = [np.zeros(len(sample.tokens), dtype=array.dtype) for sample in pack.samples]
    for piece in pack.pieces:
        columns[piece.sample][piece.first : piece.last] = array[piece.place]
    for row in pack.rows:
        for members, prefix in row:
            for i in members[1:]:
                columns[i][:prefix] = columns[members[0]][:prefix]
    return columns


ImageCost = Callable[[Media], float]
"""Cost of an image in a pass, in language tokens."""


def pack_cost(samples: Sequence[Sample], layout: Layout, image_cost: ImageCost) -> float:
    """Return the cost of a pass over these samples as one pack: tokens with padding, and each distinct image once."""
    if not samples:
        return 0.0
    lengths = [len(sample.tokens) for sample in samples]
    if layout == "padded":
        tokens = len(lengths) * max(lengths)
    else:
        tokens = sum(lengths) - (_num_shared(samples) if layout == "shared" else 0)
    images = {item.hash: item for sample in samples for item in sample.media}
    return tokens + sum(image_cost(item) for item in images.values())


def _num_shared(samples: Sequence[Sample]) -> int:
    """Count the tokens that sharing prompts saves."""
    saved = 0
    with_prompt = [sample for sample in samples if sample.shares_prompt]
    for _, run in groupby(with_prompt, key=lambda sample: sample.group):
        members = list(run)
        saved += (len(members) - 1) * min(sample.prompt_length for sample in members)
    return saved


Unit = Literal["image", "group", "response", "sample"]


def units(samples: Sequence[Sample], finest: Unit) -> list[list[int]]:
    """Return the indices of samples to keep in one pack, ordered by the first sample of each unit.

    `image`: samples with the same images in their prompt, or without images and with the same prompt; `group`: with the
    same prompt; `response`: of the same response; `sample`: single samples.
    """
    if finest == "response":
        return by_response(samples)
    images: dict[int, tuple[str, ...]] = {}
    for sample in samples:
        if sample.shares_prompt:
            images.setdefault(sample.group, tuple(item.hash for item in sample.prompt_media))
    members_by_key: dict[object, list[int]] = {}
    for i, sample in enumerate(samples):
        if finest == "sample":
            key: object = i
        else:
            key = (images.get(sample.group) or sample.group) if finest == "image" else sample.group
        members_by_key.setdefault(key, []).append(i)
    return [sorted(members, key=lambda i: (samples[i].group, i)) for members in members_by_key.values()]


def by_response(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of the samples of each response, in the order of their first samples."""
    members: dict[tuple[bool, int], list[int]] = {}
    for i, sample in enumerate(samples):
        key = (False, i) if sample.response is None else (True, sample.response)
        members.setdefault(key, []).append(i)
    return list(members.values())


def cuts(samples: Sequence[Sample], *, whole_responses: bool) -> list[int]:
    """Return the positions at which a pack of these samples can be cut in two."""
    return [
        k
        for k in range(1, len(samples))
        if not whole_responses or samples[k].response is None or samples[k].response != samples[k - 1].response
    ]


def make_packs(
    samples: Sequence[Sample],
    ids: Sequence[int],
    *,
    layout: Layout,
    max_tokens: int,
    max_samples: int | None,
    image_cost: ImageCost,
    whole_responses: bool = False,
) -> list[Pack]:
    """Split samples into packs of at most `max_tokens` cost and `max_samples` samples.

    Samples with the same images stay together, else those of a group, as far as the budget allows. A sample above the
    budget gets a separate pack; with `whole_responses`, all samples of a response above the budget do.
    """
    packs: list[list[int]] = [[]]
    finer: tuple[Unit, ...] = ("group", "response") if whole_responses else ("group", "sample")

    def fits(members: list[int]) -> bool:
        within_samples = max_samples is None or len(members) <= max_samples
        return within_samples and pack_cost([samples[i] for i in members], layout, image_cost) <= max_tokens

    def add(unit: list[int], finer: tuple[Unit, ...]) -> None:
        if fits(packs[-1] + unit):
            packs[-1] = packs[-1] + unit
        elif fits(unit) or not finer or not cuts([samples[i] for i in unit], whole_responses=whole_responses):
            packs.append(unit)
        else:
            for part in units([samples[i] for i in unit], finer[0]):
                add([unit[k] for k in part], finer[1:])

    for unit in units(samples, "image"):
        add(unit, finer)
    return [make_pack([samples[i] for i in pack], [ids[i] for i in pack], layout) for pack in packs if pack]
