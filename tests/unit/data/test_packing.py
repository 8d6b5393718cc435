"""Packing: layout and its inverse, shared prefixes, costs, and splitting a batch within a budget."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from vlmrl.data.media import Blank
from vlmrl.data.packing import FILLER, Branch, Pack, collect, cuts, make_pack, make_packs, pack_cost, place, units
from vlmrl.errors import DataError
from vlmrl.types import Layout, Media, Sample

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")


dot = partial(Blank, size=(28, 28))


def text(length: int, first: int = 0, group: int = 0) -> Sample:
    """A sample whose tokens are all sampled, so that it shares no prefix."""
    return Sample(tokens=np.arange(first, first + length), sampled=np.ones(length, dtype=np.bool_), group=group)


def response(
    prompt: Sequence[int], tokens: Sequence[int], group: int = 0, media: Sequence[Media] = (), source: str = ""
) -> Sample:
    whole = np.array([*prompt, *tokens], dtype=np.int64)
    return Sample(whole, np.arange(len(whole)) >= len(prompt), tuple(media), group, source)


def branches(samples: Sequence[Sample], ids: Sequence[int] | None = None) -> tuple[Branch, ...]:
    rows = make_pack(samples, range(len(samples)) if ids is None else ids, "shared").rows
    assert len(rows) == 1
    return rows[0]


def singles(*row: int) -> tuple[Branch, ...]:
    return tuple(Branch((i,), 0) for i in row)


A, B, C = text(3, 10), text(2, 20), text(4, 30)

# Two responses to one prompt, two to another, and one to a third.
RESPONSES = [
    response([1, 2, 3], [4, 5], group=0),
    response([1, 2, 3], [6], group=0),
    response([7, 8], [9], group=1),
    response([7, 8], [10, 11], group=1),
    response([1, 2], [12], group=2),
]


# ---------------------------------------------------------------- layout


def test_padded_rows_hold_one_sample_each() -> None:
    pack = make_pack([A, B, C], [5, 6, 7], "padded")
    assert pack.shape == (3, 4)
    assert pack.num_tokens == pack.num_useful == 9
    assert pack.is_one_per_row
    laid = place(pack, [sample.tokens for sample in pack.samples], fill=-1)
    assert laid.tolist() == [[10, 11, 12, -1], [20, 21, -1, -1], [30, 31, 32, 33]]


def test_a_packed_row_concatenates_all_samples() -> None:
    pack = make_pack([A, B, C], [5, 6, 7], "packed")
    assert pack.shape == (1, 9)
    assert not pack.is_one_per_row
    laid = place(pack, [sample.tokens for sample in pack.samples], fill=-1)
    assert laid.tolist() == [[10, 11, 12, 20, 21, 30, 31, 32, 33]]


def test_rows_may_hold_any_samples_in_any_order() -> None:
    pack = Pack((A, B, C), rows=(singles(2), singles(1, 0)), ids=(0, 1, 2))
    laid = place(pack, [sample.tokens for sample in pack.samples], fill=0)
    assert laid.tolist() == [[30, 31, 32, 33, 0], [20, 21, 10, 11, 12]]


def test_a_shared_prompt_is_stored_once_before_its_responses() -> None:
    pack = make_pack(RESPONSES, range(5), "shared")
    assert pack.rows == ((Branch((0, 1), 3), Branch((2, 3), 2), Branch((4,), 0)),)
    laid = place(pack, [sample.tokens for sample in pack.samples], fill=0)
    assert laid.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 12]]
    # row, start, sample, first, last, parent
    assert [tuple(piece) for piece in pack.pieces] == [
        (0, 0, 0, 0, 3, None),
        (0, 3, 0, 3, 5, 0),
        (0, 5, 1, 3, 4, 0),
        (0, 6, 2, 0, 2, None),
        (0, 8, 2, 2, 3, 3),
        (0, 9, 3, 2, 4, 3),
        (0, 11, 4, 0, 3, None),
    ]
    # Without sharing: 5 + 4 + 3 + 4 + 3.
    assert (pack.num_tokens, pack.num_useful) == (14, 19)


def test_shared_tokens_take_the_first_samples_values_and_return_them_to_all() -> None:
    pack = make_pack(RESPONSES[:3], range(3), "shared")
    columns = [np.array([1, 2, 3, 4, 5]), np.array([0, 0, 0, 6]), np.array([7, 8, 9])]
    laid = place(pack, columns, fill=0)
    assert laid.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert [row.tolist() for row in collect(pack, laid * 10)] == [[10, 20, 30, 40, 50], [10, 20, 30, 60], [70, 80, 90]]


@pytest.mark.parametrize(
    "rows", [(singles(0, 1, 2),), (singles(0), singles(1), singles(2)), (singles(2, 0), singles(1))]
)
def test_collect_inverts_place(rows: tuple[tuple[Branch, ...], ...]) -> None:
    pack = Pack((A, B, C), rows=rows, ids=(0, 1, 2))
    columns = [np.random.default_rng(i).random(len(s.tokens)).astype(np.float32) for i, s in enumerate(pack.samples)]
    laid = place(pack, columns, fill=float("nan"))
    assert laid.dtype == torch.float32
    for column, back in zip(columns, collect(pack, laid), strict=True):
        assert back.tolist() == column.tolist()


def test_arrays_of_other_lengths_are_refused() -> None:
    pack = make_pack([A, B], [0, 1], "packed")
    with pytest.raises(ValueError, match="lengths of the arrays"):
        place(pack, [A.tokens, A.tokens], fill=0)


def test_a_pack_must_hold_each_sample_once() -> None:
    with pytest.raises(ValueError, match="each of its 2 samples once"):
        Pack((A, B), rows=(singles(0),), ids=(0, 1))
    with pytest.raises(ValueError, match="each of its 2 samples once"):
        Pack((A, B), rows=((Branch((0, 1), 1), Branch((1,), 0)),), ids=(0, 1))
    with pytest.raises(ValueError, match="has 1 ids"):
        Pack((A, B), rows=(singles(0, 1),), ids=(0,))


def test_the_images_of_a_pack_are_distinct_and_in_order() -> None:
    one, two = dot("one"), dot("two")
    samples = [response([1], [2], 0, [two]), response([3, 4], [5], 1, [one, two]), response([3, 4], [6], 1, [one, two])]
    assert list(make_pack(samples, range(3), "shared").media) == ["two", "one"]
    assert list(make_pack(samples[1:], range(2), "padded").media) == ["one", "two"]


# ---------------------------------------------------------------- shared prefixes


def test_only_adjacent_samples_of_a_group_share() -> None:
    first, second, other = RESPONSES[0], RESPONSES[1], RESPONSES[4]
    assert branches([first, other, second]) == singles(0, 1, 2)
    assert branches([other, first, second]) == (Branch((0,), 0), Branch((1, 2), 3))


def test_fillers_share_no_prefix() -> None:
    blank = response([1, 2, 3], [])
    assert branches([RESPONSES[0], RESPONSES[1], blank, blank], [0, 1, FILLER, FILLER]) == (
        Branch((0, 1), 3),
        *singles(2, 3),
    )
    assert branches([blank, RESPONSES[0]], [FILLER, 0]) == singles(0, 1)


def test_an_empty_response_is_only_its_prompt() -> None:
    pack = make_pack([response([1, 2], []), response([1, 2], [3]), response([1, 2], [])], range(3), "shared")
    assert [tuple(piece) for piece in pack.pieces] == [(0, 0, 0, 0, 2, None), (0, 2, 1, 2, 3, 0)]
    assert pack.shape == (1, 3)
    assert [row.tolist() for row in collect(pack, torch.tensor([[5, 6, 7]]))] == [[5, 6], [5, 6, 7], [5, 6]]


def test_samples_without_a_prompt_share_nothing() -> None:
    pack = make_pack([text(3), text(2)], range(2), "shared")
    assert pack.pieces == make_pack([text(3), text(2)], range(2), "packed").pieces
    assert pack.num_tokens == 5


def test_the_shared_prefix_ends_at_the_first_sampled_token_of_any() -> None:
    # The second response starts one token earlier.
    late, early = response([1, 2, 3], [4]), response([1, 2], [9, 4])
    assert branches([late, early]) == (Branch((0, 1), 2),)


@pytest.mark.parametrize(("source", "name"), [("arithmetic:17", "arithmetic:17"), ("", "prompt 3 of the batch")])
def test_different_prompts_in_a_group_are_an_error(source: str, name: str) -> None:
    members = [response([1, 2, 3], [4], 3, source=source) for _ in range(2)]
    different = response([1, 9, 3], [4], 3, source=source)
    with pytest.raises(DataError, match=rf"to {name} do not share its prompt: at token 1 of 3, one has 2 and.* 9;"):
        make_pack([*members, different], range(3), "shared")
    for layout in ("packed", "padded"):
        make_pack([*members, different], range(3), layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("others", [(), (dot("other"),), (dot("dot"), dot("dot"))])
def test_different_images_in_a_group_are_an_error(others: tuple[Blank, ...]) -> None:
    members = [response([1, 2], [3], 0, media, "charts:5") for media in ((dot("dot"),), others)]
    with pytest.raises(DataError, match="to charts:5 do not share its images"):
        make_pack(members, range(2), "shared")


# ---------------------------------------------------------------- costs


def test_cost_by_hand_in_every_layout() -> None:
    samples = [
        response([1, 2, 3], [4, 5], 0, [dot("dot")]),
        response([1, 2, 3], [6], 0, [dot("dot")]),
        text(4, group=1),
    ]
    # 5, 4 and 4 tokens; one image of 10.
    expected = {"padded": 3 * 5 + 10, "packed": 5 + 4 + 4 + 10, "shared": 3 + 2 + 1 + 4 + 10}
    for layout in LAYOUTS:
        assert pack_cost(samples, layout, lambda image: 10.0) == expected[layout]
        assert pack_cost([], layout, lambda image: 10.0) == 0


def test_each_distinct_image_costs_once() -> None:
    media = {"small": Blank("small", (28, 28)), "large": Blank("large", (56, 56))}
    samples = [response([1], [2], 0, [media["small"]]), response([1, 1], [2], 1, [media["large"], media["small"]])]
    assert pack_cost(samples, "shared", lambda image: image.size[0] / 28) == 2 + 3 + 1 + 2


def ids_of(packs: list[Pack]) -> list[tuple[int, ...]]:
    return [pack.ids for pack in packs]


def packs_of(samples: Sequence[Sample], **settings: Any) -> list[Pack]:
    free: dict[str, Any] = {"layout": "packed", "max_tokens": 10, "max_samples": None, "image_cost": lambda image: 0.0}
    return make_packs(samples, range(len(samples)), **free | settings)


# ---------------------------------------------------------------- splitting a batch


def test_packs_stay_within_the_budget_and_keep_the_order() -> None:
    samples = [text(n, group=i) for i, n in enumerate((4, 5, 1, 6, 9, 2))]
    assert ids_of(packs_of(samples)) == [(0, 1, 2), (3,), (4,), (5,)]


def test_padding_counts_towards_the_budget() -> None:
    # Rows of 2, 2 and 5 tokens are 15 padded tokens; packed they are 9.
    samples = [text(2, group=0), text(2, group=1), text(5, group=2)]
    assert ids_of(packs_of(samples, layout="padded", max_tokens=14)) == [(0, 1), (2,)]
    assert ids_of(packs_of(samples, layout="padded", max_tokens=15)) == [(0, 1, 2)]
    assert ids_of(packs_of(samples, layout="packed", max_tokens=9)) == [(0, 1, 2)]


def test_a_shared_prompt_counts_once_towards_the_budget() -> None:
    # Packed 7 + 7 = 14 tokens, shared 5 + 2 + 2 = 9.
    samples = [response(range(5), [7, 7]), response(range(5), [8, 8])]
    assert ids_of(packs_of(samples, layout="shared", max_tokens=9)) == [(0, 1)]
    assert ids_of(packs_of(samples, layout="shared", max_tokens=8)) == [(0,), (1,)]
    assert ids_of(packs_of(samples, layout="packed", max_tokens=13)) == [(0,), (1,)]


@pytest.mark.parametrize(("layout", "tokens"), [("packed", 2 + 3), ("padded", 3 + 3), ("shared", 2 + 3)])
def test_images_count_towards_the_budget_of_every_layout(layout: str, tokens: int) -> None:
    samples = [response([1], [2], 0, [dot("one")]), response([1, 1], [2], 1, [dot("two")])]
    budget = {"layout": layout, "image_cost": lambda image: 100.0}
    assert ids_of(packs_of(samples, max_tokens=tokens + 200, **budget)) == [(0, 1)]
    assert ids_of(packs_of(samples, max_tokens=tokens + 199, **budget)) == [(0,), (1,)]


def test_samples_of_one_image_go_into_one_pack() -> None:
    one, two = [dot("one")], [dot("two")]
    samples = [response([1], [2], group, media) for group, media in enumerate([one, two, one, two])]
    # Each image is 4, each sample 2: two prompts with the same image are 8.
    assert ids_of(packs_of(samples, max_tokens=8, image_cost=lambda image: 4.0)) == [(0, 2), (1, 3)]


def test_samples_of_one_image_over_the_budget_are_split_by_group() -> None:
    samples = [response([1, 2], [3], group, [dot("dot")]) for group in (0, 1, 0, 1, 2)]
    # 4 for the image and 2 + 1 + 1 for a group of two: 8 holds one group; the last one is 4 + 3.
    packs = packs_of(samples, layout="shared", max_tokens=8, image_cost=lambda image: 4.0)
    assert ids_of(packs) == [(0, 2), (1, 3), (4,)]


def test_a_group_is_split_only_when_it_must_be() -> None:
    samples = [response([1, 2], [3], group) for group in (0, 0, 1, 1, 1, 1)]
    # Groups of 2 + 2 and 2 + 4 tokens; 6 holds either, 5 only three responses of the second.
    assert ids_of(packs_of(samples, layout="shared", max_tokens=6)) == [(0, 1), (2, 3, 4, 5)]
    assert ids_of(packs_of(samples, layout="shared", max_tokens=5)) == [(0, 1), (2, 3, 4), (5,)]


def test_a_sample_over_the_budget_gets_its_own_pack() -> None:
    for group in (0, 1):
        samples = [text(2), text(50, group=group), text(2, group=2 * group)]
        assert ids_of(packs_of(samples)) == [(0,), (1,), (2,)]


def test_the_number_of_samples_is_limited() -> None:
    assert ids_of(packs_of([text(1)] * 5, max_samples=2)) == [(0, 1), (2, 3), (4,)]
    assert ids_of(packs_of([text(1, group=i // 2) for i in range(6)], max_samples=3)) == [(0, 1), (2, 3), (4, 5)]


def test_an_empty_batch_gives_no_packs() -> None:
    assert packs_of([]) == []


def test_units_are_images_groups_or_samples() -> None:
    media = [dot("one")], [dot("two")], [dot("one")], (), ()
    samples = [response([1], [2], group, dots) for group, dots in zip((5, 4, 3, 2, 2), media, strict=True)]
    assert units(samples, "image") == [[2, 0], [1], [3, 4]]
    assert units(samples, "group") == [[0], [1], [2], [3, 4]]
    assert units(samples, "sample") == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(8))
def test_any_batch_is_split_into_packs_that_hold_each_sample_once(layout: Layout, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(8):
        prompt, media = rng.integers(0, 9, int(rng.integers(0, 12))), [dot(str(rng.integers(4)))] * int(rng.integers(2))
        lengths = rng.integers(1, 9, int(rng.integers(1, 5)))
        samples += [response(prompt, rng.integers(0, 9, length), group, media) for length in lengths]
    order = rng.permutation(len(samples))
    samples = [samples[i] for i in order]
    budget = int(rng.integers(8, 60))
    packs = packs_of(samples, layout=layout, max_tokens=budget, image_cost=lambda image: 7.0)

    def cost(members: Sequence[int]) -> float:
        return pack_cost([samples[i] for i in members], layout, lambda image: 7.0)

    assert sorted(i for pack in packs for i in pack.ids) == list(range(len(samples)))
    for pack in packs:
        assert all(pack.samples[k] is samples[i] for k, i in enumerate(pack.ids))
        assert len(pack.ids) == 1 or cost(pack.ids) <= budget
        # The estimated cost is that of the layout.
        rows, width = pack.shape
        laid = rows * width if layout == "padded" else pack.num_tokens
        assert cost(pack.ids) == laid + 7 * len(pack.media)
        back = collect(pack, place(pack, [sample.tokens for sample in pack.samples], fill=-1))
        assert [row.tolist() for row in back] == [sample.tokens.tolist() for sample in pack.samples]
    for group in {sample.group for sample in samples}:
        members = [i for i, sample in enumerate(samples) if sample.group == group]
        packs_of_group = {n for n, pack in enumerate(packs) if set(members) & set(pack.ids)}
        assert len(packs_of_group) == 1 or cost(members) > budget


# ---------------------------------------------------------------- segments of conversations


def segment(tokens: Sequence[int], sampled: Sequence[int], response: int, *, shares: bool, group: int = 0) -> Sample:
    flags = np.isin(np.arange(len(tokens)), sampled)
    return Sample(np.array(tokens), flags, group=group, response=response, shares_prompt=shares)


SEGMENTS = [
    segment([1, 2, 3, 4, 5, 6], [3, 5], 0, shares=True),
    segment([1, 9, 4, 6, 7], [4], 0, shares=False),
    segment([1, 2, 3, 8], [3], 1, shares=True),
    segment([1, 9, 8, 7], [3], 1, shares=False),
    segment([5, 6, 7], [2], 2, shares=True, group=1),
]


def test_responses_share_their_prompt_across_segments_with_a_rewritten_history() -> None:
    pack = make_pack(SEGMENTS, range(5), "shared")
    assert pack.rows == ((Branch((0, 2), 3), *singles(1, 3, 4)),)
    assert pack.num_tokens == 22 - 3
    assert pack_cost(SEGMENTS, "shared", lambda image: 0.0) == pack.num_tokens
    rows = [np.arange(len(sample.tokens)) + 10 * i for i, sample in enumerate(SEGMENTS)]
    back = collect(pack, place(pack, rows, fill=-1))
    assert [row.tolist() for row in back[:2]] == [row.tolist() for row in rows[:2]]
    assert back[2].tolist() == [0, 1, 2, 23], "the prompt has the values of the first"
    assert pack.owners == (0, 0, 1, 1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cost_of_any_pack_of_segments_is_the_tokens_that_it_computes(layout: Layout) -> None:
    for pack in packs_of(SEGMENTS, layout=layout, max_tokens=16, whole_responses=False):
        rows, columns = pack.shape
        tokens = rows * columns if layout == "padded" else pack.num_tokens
        assert pack_cost(pack.samples, layout, lambda image: 0.0) == tokens <= 16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_tokens", [1, 9, 12, 100])
def test_whole_responses_stay_in_one_pack(layout: Layout, max_tokens: int) -> None:
    packs = packs_of(SEGMENTS, layout=layout, max_tokens=max_tokens, whole_responses=True)
    assert sorted(i for pack in packs for i in pack.ids) == list(range(5))
    for number in range(3):
        assert sum(number in {s.response for s in pack.samples} for pack in packs) == 1
    if max_tokens == 1:
        assert len(packs) == 3, "a response above the budget has a pack of its own"


def test_cuts_are_between_responses_if_those_stay_whole() -> None:
    assert cuts(SEGMENTS, whole_responses=False) == [1, 2, 3, 4]
    assert cuts(SEGMENTS, whole_responses=True) == [2, 4]


def test_images_of_later_turns_may_differ_within_a_group() -> None:
    first, second = (
        replace(response([1, 2], [3, 4], media=(dot("one"), dot(name))), num_prompt_images=1) for name in "ab"
    )
    assert branches([first, second]) == (Branch((0, 1), 2),)
    assert units([first, second], "image") == [[0, 1]]
    assert list(make_pack([first, second], range(2), "shared").media) == ["one", "a", "b"]
