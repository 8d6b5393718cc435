"""Distribute samples over ranks by cost, with the same number of packs on each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from vlmrl.data.packing import FILLER, ImageCost, Pack, cuts, make_pack, make_packs, pack_cost, units
from vlmrl.types import Layout, Sample

TOLERANCE = 1.1
"""Groups stay whole while the busiest rank has at most this multiple of the mean cost."""

PackCost = Callable[[Sequence[Sample]], float]
"""Cost of a pack with these samples."""


def spread(
    samples: Sequence[Sample],
    *,
    num_ranks: int,
    layout: Layout,
    max_tokens: int,
    max_samples: int | None,
    image_cost: ImageCost,
    filler: Sample | None,
    whole_responses: bool = False,
) -> list[list[Pack]]:
    """Give every rank the same number of packs and about the same cost; `result[rank]` holds that rank's packs.

    `Pack.ids` are indices into `samples`. Samples with the same images or prompt stay on one rank, where the shared
    part is computed once, unless a rank would then be more than 10 % above the mean cost. A rank with too few packs
    splits the ones it has, then receives fillers: samples without a sampled token. With several ranks and an image
    anywhere in the batch, `filler` is appended to each pack without an image: under ZeRO a rank that skips the vision
    tower would leave the others waiting in a collective.

    Args:
        filler: the smallest sample with an image (`processor.dummy_sample()`); None for text models.
        whole_responses: all samples of a response stay in one pack.

    Raises:
        ValueError: `samples` is empty.
    """
    if not samples:
        raise ValueError("there are no samples to spread over ranks")

    def cost(members: Sequence[Sample]) -> float:
        return pack_cost(members, layout, image_cost)

    ranks = [
        make_packs(
            [samples[i] for i in share],
            share,
            layout=layout,
            max_tokens=max_tokens,
            max_samples=max_samples,
            image_cost=image_cost,
            whole_responses=whole_responses,
        )
        for share in _assign(samples, num_ranks, cost, whole_responses=whole_responses)
    ]
    blank = filler if filler is not None else _blank(samples[0])
    num_packs = max(len(packs) for packs in ranks)
    ranks = [_pad_to(packs, num_packs, blank, layout, cost, whole_responses=whole_responses) for packs in ranks]
    if num_ranks == 1 or filler is None or not any(pack.media for packs in ranks for pack in packs):
        return ranks
    return [[pack if pack.media else _with_filler(pack, filler, layout) for pack in packs] for packs in ranks]


def _assign(samples: Sequence[Sample], num_ranks: int, cost: PackCost, *, whole_responses: bool) -> list[list[int]]:
    """Return the ascending sample indices of each rank.

    While the busiest rank is above the tolerance, its costliest unit is split in two; the assignment with the lowest
    maximum cost of all that were tried is returned.
    """

    def cuts_of(unit: list[int]) -> list[int]:
        return cuts([samples[i] for i in unit], whole_responses=whole_responses)

    entries = [(cost([samples[i] for i in unit]), unit) for unit in units(samples, "image")]
    best: tuple[float, list[list[int]]] | None = None
    while True:
        loads, shares = _longest_first(entries, num_ranks)
        if best is None or max(loads) < best[0]:
            best = max(loads), [sorted(i for unit in share for i in unit) for share in shares]
        if max(loads) <= TOLERANCE * sum(loads) / num_ranks:
            return best[1]
        # Units are told apart by their first sample: comparing lists would take the square of their number.
        busiest = {unit[0] for unit in shares[loads.index(max(loads))]}
        divisible = [entry for entry in entries if entry[1][0] in busiest and cuts_of(entry[1])]
        if not divisible:
            return best[1]
        largest = max(divisible, key=lambda entry: entry[0])
        entries.remove(largest)
        middle = _middle([samples[i] for i in largest[1]], cuts_of(largest[1]), cost)
        parts = (largest[1][:middle], largest[1][middle:])
        entries += [(cost([samples[i] for i in part]), part) for part in parts]


def _longest_first(entries: list[tuple[float, list[int]]], num_ranks: int) -> tuple[list[float], list[list[list[int]]]]:
    """Assign units by decreasing cost, each to the least loaded rank (Graham 1969, doi.org/10.1137/0117039)."""
    shares: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for weight, unit in sorted(entries, key=lambda entry: (-entry[0], entry[1][0])):
        load, rank = heapq.heappop(heap)
        shares[rank].append(unit)
        heapq.heappush(heap, (load + weight, rank))
    return [load for load, _ in sorted(heap, key=lambda entry: entry[1])], shares


def _middle(samples: Sequence[Sample], positions: Sequence[int], cost: PackCost) -> int:
    """Return the position that minimises the cost of the costlier half."""
    return min(positions, key=lambda k: max(cost(samples[:k]), cost(samples[k:])))


def _pad_to(
    packs: list[Pack], count: int, blank: Sample, layout: Layout, cost: PackCost, *, whole_responses: bool
) -> list[Pack]:
    """Split the costliest packs until there are `count`; once none can be split, add fillers."""
    packs = list(packs)
    while len(packs) < count:
        positions = [cuts(pack.samples, whole_responses=whole_responses) for pack in packs]
        divisible = [k for k, of_pack in enumerate(positions) if of_pack]
        if not divisible:
            packs += [make_pack([blank], [FILLER], layout)] * (count - len(packs))
            break
        k = max(divisible, key=lambda k: cost(packs[k].samples))
        middle = _middle(packs[k].samples, positions[k], cost)
        parts = (slice(None, middle), slice(middle, None))
        packs[k : k + 1] = [make_pack(packs[k].samples[part], packs[k].ids[part], layout) for part in parts]
    return packs


def _with_filler(pack: Pack, filler: Sample, layout: Layout) -> Pack:
    return make_pack([*pack.samples, filler], [*pack.ids, FILLER], layout)


def _blank(sample: Sample) -> Sample:
    """Return a text sample with zero weight in every loss, for batches without images."""
    tokens = sample.tokens[:2]
    return Sample(tokens=tokens, sampled=np.zeros(len(tokens), dtype=np.bool_))
