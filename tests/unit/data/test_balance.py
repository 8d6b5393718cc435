"""Distribution over ranks: no sample lost, equal numbers of packs, balanced cost, shared parts on one rank."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from vlmrl.data import balance
from vlmrl.data.balance import spread
from vlmrl.data.media import Blank
from vlmrl.data.packing import FILLER, Branch, Pack
from vlmrl.types import Sample

dot = partial(Blank, size=(28, 28))


def text(length: int, group: int = 0) -> Sample:
    return Sample(tokens=np.arange(length), sampled=np.ones(length, dtype=np.bool_), group=group)


def image(length: int, group: int = 0, name: str = "dot") -> Sample:
    return Sample(tokens=np.arange(length), sampled=np.ones(length, dtype=np.bool_), media=(dot(name),), group=group)


def response(prompt: int, length: int, group: int) -> Sample:
    """A sample with `prompt` prompt tokens and `length` response tokens."""
    whole = np.arange(prompt + length)
    return Sample(tokens=whole, sampled=whole >= prompt, group=group)


BLANK = Sample(tokens=np.arange(3), sampled=np.zeros(3, dtype=np.bool_), media=(dot("dot"),))


def run(samples: list[Sample], **changes: Any) -> list[list[Pack]]:
    settings: dict[str, Any] = {
        "num_ranks": 2,
        "layout": "packed",
        "max_tokens": 100,
        "max_samples": None,
        "image_cost": lambda image: 0.0,
        "filler": None,
    }
    return spread(samples, **settings | changes)


def ids(ranks: list[list[Pack]]) -> list[list[int]]:
    return [[i for pack in packs for i in pack.ids] for packs in ranks]


@pytest.mark.parametrize("layout", ["packed", "padded", "shared"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
def test_each_sample_is_on_one_rank_and_ranks_have_equal_numbers_of_packs(
    layout: str, num_ranks: int, max_tokens: int
) -> None:
    lengths = np.random.default_rng(0).integers(2, 30, 23)
    samples = [(image if i // 4 % 3 else text)(int(n), group=i // 4) for i, n in enumerate(lengths)]
    ranks = run(samples, num_ranks=num_ranks, layout=layout, max_tokens=max_tokens, filler=BLANK)
    assert sorted(i for rank in ids(ranks) for i in rank if i != FILLER) == list(range(23))
    assert len({len(packs) for packs in ranks}) == 1
    for packs in ranks:
        for pack in packs:
            assert all(pack.samples[k] is samples[i] for k, i in enumerate(pack.ids) if i != FILLER)
            assert num_ranks == 1 or pack.media


def test_the_distribution_is_deterministic() -> None:
    samples = [text(int(n), group=i) for i, n in enumerate(np.random.default_rng(1).integers(2, 30, 40))]
    assert ids(run(samples)) == ids(run(samples))


def test_the_costliest_group_goes_to_the_least_loaded_rank() -> None:
    # Groups of 9, 7, 6 and 4: 9 | 7, then 6 joins 7, and 4 joins 9.
    samples = [text(9, 0), text(7, 1), text(6, 2), text(4, 3)]
    assert ids(run(samples)) == [[0, 3], [1, 2]]


def test_groups_stay_whole_while_ranks_are_balanced() -> None:
    samples = [text(5, group=i // 4) for i in range(16)]
    for rank in ids(run(samples, num_ranks=4)):
        assert len({i // 4 for i in rank}) == 1


def test_groups_are_split_when_a_rank_would_be_overloaded() -> None:
    # Three groups of four on two ranks: whole groups would be 40 to 20.
    samples = [text(5, group=i // 4) for i in range(12)]
    loads = [sum(len(samples[i].tokens) for i in rank) for rank in ids(run(samples))]
    assert loads == [30, 30]


def test_a_shared_prompt_costs_once() -> None:
    # Shared, the group of four is 6 + 4 * 2 = 14, as much as both others; packed it is 32 of 46, and is halved.
    samples = [*(response(6, 2, 0) for _ in range(4)), text(7, 1), text(7, 2)]
    assert ids(run(samples, layout="shared")) == [[0, 1, 2, 3], [4, 5]]
    assert [len(rank) for rank in ids(run(samples))] == [3, 3]


def test_samples_of_one_image_stay_on_one_rank_and_the_image_costs_once() -> None:
    # 3 * 5 tokens and the image once, 10, are as much as the text; with the image counted three times they were 45.
    samples = [image(5, 0), text(25, 1), image(5, 2), image(5, 3)]
    assert ids(run(samples, image_cost=lambda media: 10.0)) == [[0, 2, 3], [1]]


def test_images_are_spread_over_ranks() -> None:
    samples = [image(5, group, name) for group, name in enumerate(["a", "b", "a", "b"])]
    assert ids(run(samples, image_cost=lambda media: 10.0)) == [[0, 2], [1, 3]]


def test_a_split_group_has_its_prompt_on_both_ranks() -> None:
    ranks = run([response(6, 2, 0) for _ in range(4)], layout="shared")
    assert [pack.rows for packs in ranks for pack in packs] == [((Branch((0, 1), 6),),)] * 2


def test_samples_of_a_single_group_use_all_ranks() -> None:
    assert [len(rank) for rank in ids(run([text(5)] * 8, num_ranks=4))] == [2, 2, 2, 2]


def test_a_rank_with_fewer_packs_splits_its_packs() -> None:
    # Rank 0: one sample of 90 and its own pack. Rank 1: 80 + 15, over the budget of 90, two packs.
    ranks = run([text(92, 0), text(80, 1), text(15, 2)], max_tokens=92)
    assert ids(ranks) == [[0, FILLER], [1, 2]]
    ranks = run([text(40, 0), text(50, 0), text(80, 1), text(15, 1)], max_tokens=92)
    assert [[pack.ids for pack in packs] for packs in ranks] == [[(2,), (3,)], [(0,), (1,)]]


def test_a_rank_without_samples_gets_fillers_without_sampled_tokens() -> None:
    ranks = run([text(5)], num_ranks=3)
    assert ids(ranks) == [[0], [FILLER], [FILLER]]
    assert not ranks[1][0].samples[0].sampled.any()
    assert not ranks[1][0].samples[0].media


def test_a_pack_without_an_image_gets_a_filler_if_another_pack_has_one() -> None:
    ranks = run([image(9, 0), text(9, 1)], filler=BLANK)
    assert ids(ranks) == [[0], [1, FILLER]]
    assert ranks[1][0].samples[1] is BLANK


def test_a_filler_shares_no_prompt() -> None:
    # The filler has group 0, like the sample beside it.
    ranks = run([image(9, 1), response(3, 2, 0), response(3, 2, 0)], layout="shared", filler=BLANK)
    assert ids(ranks) == [[0], [1, 2, FILLER]]
    assert ranks[1][0].rows == ((Branch((0, 1), 3), Branch((2,), 0)),)


def test_a_batch_of_text_gets_no_images() -> None:
    assert ids(run([text(9, 0), text(9, 1)], filler=BLANK)) == [[0], [1]]


def test_a_single_rank_needs_no_fillers() -> None:
    ranks = run([image(90, 0), text(90, 1)], num_ranks=1, filler=BLANK)
    assert ids(ranks) == [[0, 1]]
    assert len(ranks[0]) == 2


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        run([])


@pytest.mark.parametrize("layout", ["packed", "padded", "shared"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
def test_whole_responses_are_in_one_pack_on_one_rank(layout: str, num_ranks: int, max_tokens: int) -> None:
    rng = np.random.default_rng(2)
    samples = []
    for number in range(12):
        for place in range(int(rng.integers(1, 4))):
            one = response(2, int(rng.integers(2, 30)), group=number // 4)
            samples.append(replace(one, response=number, shares_prompt=place == 0))
    ranks = run(samples, num_ranks=num_ranks, layout=layout, max_tokens=max_tokens, whole_responses=True)
    assert sorted(i for rank in ids(ranks) for i in rank if i != FILLER) == list(range(len(samples)))
    assert len({len(packs) for packs in ranks}) == 1
    packs = [pack for of_rank in ranks for pack in of_rank]
    for number in range(12):
        assert sum(number in {s.response for s in pack.samples} for pack in packs) == 1


def test_the_work_does_not_grow_with_the_square_of_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = 0

    class Unit(list[int]):  # noqa: PLW1641 - no list has a hash
        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return super().__eq__(other)

    monkeypatch.setattr(balance, "units", lambda samples, finest: [Unit([i]) for i in range(len(samples))])
    ranks = run([text(5, group=i) for i in range(400)])
    assert [len(rank) for rank in ids(ranks)] == [200, 200]
    assert comparisons < 400


def test_a_pair_stays_in_one_pack_whatever_the_limit_of_samples() -> None:
    pairs = [replace(text(10, group=number // 2), response=number // 2) for number in range(6)]
    ranks = run(pairs, num_ranks=1, max_samples=1, whole_responses=True)
    assert [pack.ids for pack in ranks[0]] == [(0, 1), (2, 3), (4, 5)]
