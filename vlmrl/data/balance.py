"""Spread samples over ranks by cost, in packs that keep the ranks' collectives in step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from vlmrl.data.packing import FILLER, Cost, Pack, cut, make_pack
from vlmrl.types import Layout, Sample

TOLERANCE = 1.1
"""Groups stay whole while the busiest rank has at most this many times its fair share."""


def spread(
    samples: Sequence[Sample],
    *,
    num_ranks: int,
    layout: Layout,
    max_tokens: int,
    max_samples: int | None,
    cost: Cost,
    filler: Sample | None,
) -> list[list[Pack]]:
    """Give every rank the same number of packs and about the same cost; `result[rank]` are that rank's packs.

    `Pack.ids` are indices into `samples`. Groups stay on one rank, for their images go through the vision tower once
    there, unless that would leave a rank more than a tenth over its fair share. A rank with too few packs first splits
    the ones it has, then receives fillers: samples without a sampled token. With several ranks and any image in the
    batch, a pack without one gets `filler` appended, because under ZeRO a rank that skips the tower leaves the others
    waiting.

    Args:
        filler: the smallest sample with an image (`processor.dummy_sample()`); None for models without images.

    Raises ValueError when there are no samples.
    """
    if not samples:
        raise ValueError("there are no samples to spread over ranks")
    costs = [cost(sample) for sample in samples]
    shares = _assign(samples, costs, num_ranks)
    ranks = [
        cut(
            [samples[i] for i in share], share, layout=layout, max_tokens=max_tokens, max_samples=max_samples, cost=cost
        )
        for share in shares
    ]
    blank = filler if filler is not None else _blank(samples[0])
    most = max(len(packs) for packs in ranks)
    ranks = [_stretch(packs, most, blank, layout, costs) for packs in ranks]
    if num_ranks == 1 or filler is None or not any(pack.holds_media for packs in ranks for pack in packs):
        return ranks
    return [[pack if pack.holds_media else _with_filler(pack, filler, layout) for pack in packs] for packs in ranks]


def _assign(samples: Sequence[Sample], costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of the samples of each rank, ascending."""
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    whole = _longest_first(list(groups.values()), costs, num_ranks)
    fair = sum(costs) / num_ranks
    if _busiest(whole, costs) <= TOLERANCE * fair:
        return whole
    single = _longest_first([[i] for i in range(len(samples))], costs, num_ranks)
    return min(whole, single, key=lambda shares: _busiest(shares, costs))


def _longest_first(units: list[list[int]], costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Graham's rule: the largest unit left goes to the rank with the least so far (doi.org/10.1137/0117039)."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for unit in sorted(units, key=lambda unit: (-sum(costs[i] for i in unit), unit[0])):
        load, rank = heapq.heappop(loads)
        shares[rank].extend(unit)
        heapq.heappush(loads, (load + sum(costs[i] for i in unit), rank))
    return [sorted(share) for share in shares]


def _busiest(shares: list[list[int]], costs: Sequence[int]) -> int:
    return max(sum(costs[i] for i in share) for share in shares)


def _stretch(packs: list[Pack], count: int, blank: Sample, layout: Layout, costs: Sequence[int]) -> list[Pack]:
    """Split the costliest packs until there are `count`; where nothing is left to split, add fillers."""
    packs = list(packs)
    while len(packs) < count:
        divisible = [k for k, pack in enumerate(packs) if len(pack.samples) > 1]
        if not divisible:
            packs += [make_pack([blank], [FILLER], layout)] * (count - len(packs))
            break
        k = max(divisible, key=lambda k: sum(costs[i] for i in packs[k].ids))
        packs[k : k + 1] = _halves(packs[k], layout, costs)
    return packs


def _halves(pack: Pack, layout: Layout, costs: Sequence[int]) -> list[Pack]:
    sums = np.cumsum([costs[i] for i in pack.ids])
    middle = int(np.argmin(np.abs(sums[:-1] - sums[-1] / 2))) + 1
    parts = (slice(None, middle), slice(middle, None))
    return [make_pack(pack.samples[part], pack.ids[part], layout) for part in parts]


def _with_filler(pack: Pack, filler: Sample, layout: Layout) -> Pack:
    return make_pack([*pack.samples, filler], [*pack.ids, FILLER], layout)


def _blank(sample: Sample) -> Sample:
    """A text sample that weighs nothing in any loss. Only for batches without images."""
    tokens = sample.tokens[:2]
    return Sample(tokens=tokens, sampled=np.zeros(len(tokens), dtype=np.bool_))
