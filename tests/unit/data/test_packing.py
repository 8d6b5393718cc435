"""Packs: where tokens go, where they come back to, and how a batch is cut into a budget."""

import numpy as np
import pytest
import torch

from vlmrl.data.packing import Pack, collect, cut, make_pack, place
from vlmrl.types import Sample


def text(length: int, first: int = 0) -> Sample:
    return Sample(tokens=np.arange(first, first + length), sampled=np.ones(length, dtype=np.bool_))


def num_tokens(sample: Sample) -> int:
    return len(sample.tokens)


A, B, C = text(3, 10), text(2, 20), text(4, 30)


def test_padded_rows_hold_one_sample_each() -> None:
    pack = make_pack([A, B, C], [5, 6, 7], "padded")
    assert pack.shape == (3, 4)
    assert pack.num_tokens == 9
    laid = place(pack, [sample.tokens for sample in pack.samples], fill=-1)
    assert laid.tolist() == [[10, 11, 12, -1], [20, 21, -1, -1], [30, 31, 32, 33]]


def test_a_packed_row_holds_all_samples_end_to_end() -> None:
    pack = make_pack([A, B, C], [5, 6, 7], "packed")
    assert pack.shape == (1, 9)
    laid = place(pack, [sample.tokens for sample in pack.samples], fill=-1)
    assert laid.tolist() == [[10, 11, 12, 20, 21, 30, 31, 32, 33]]


def test_rows_may_hold_any_samples_in_any_order() -> None:
    pack = Pack((A, B, C), rows=((2,), (1, 0)), ids=(0, 1, 2))
    laid = place(pack, [sample.tokens for sample in pack.samples], fill=0)
    assert laid.tolist() == [[30, 31, 32, 33, 0], [20, 21, 10, 11, 12]]


@pytest.mark.parametrize("rows", [((0, 1, 2),), ((0,), (1,), (2,)), ((2, 0), (1,))])
def test_collect_undoes_place(rows: tuple[tuple[int, ...], ...]) -> None:
    pack = Pack((A, B, C), rows=rows, ids=(0, 1, 2))
    columns = [np.random.default_rng(i).random(len(s.tokens)).astype(np.float32) for i, s in enumerate(pack.samples)]
    laid = place(pack, columns, fill=float("nan"))
    assert laid.dtype == torch.float32
    for column, back in zip(columns, collect(pack, laid), strict=True):
        assert back.tolist() == column.tolist()


def test_arrays_that_do_not_line_up_are_refused() -> None:
    pack = make_pack([A, B], [0, 1], "packed")
    with pytest.raises(ValueError, match="line up"):
        place(pack, [A.tokens, A.tokens], fill=0)


def test_a_pack_that_loses_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="each of its 2 samples once"):
        Pack((A, B), rows=((0,),), ids=(0, 1))
    with pytest.raises(ValueError, match="has 1 ids"):
        Pack((A, B), rows=((0, 1),), ids=(0,))


def ids_of(packs: list[Pack]) -> list[tuple[int, ...]]:
    return [pack.ids for pack in packs]


def test_packs_stay_within_the_budget_and_keep_the_order() -> None:
    samples = [text(n) for n in (4, 5, 1, 6, 9, 2)]
    packs = cut(samples, range(6), layout="packed", max_tokens=10, max_samples=None, cost=num_tokens)
    assert ids_of(packs) == [(0, 1, 2), (3,), (4,), (5,)]


def test_padding_counts_towards_the_budget() -> None:
    # Rows of 2, 2 and 5 tokens are 15 padded tokens; packed they are 9.
    samples = [text(2), text(2), text(5)]
    padded = cut(samples, range(3), layout="padded", max_tokens=14, max_samples=None, cost=num_tokens)
    assert ids_of(padded) == [(0, 1), (2,)]
    enough = cut(samples, range(3), layout="padded", max_tokens=15, max_samples=None, cost=num_tokens)
    assert ids_of(enough) == [(0, 1, 2)]


def test_patches_count_towards_the_budget_of_both_layouts() -> None:
    samples = [text(2), text(3)]
    for layout, budget in (("packed", 2 + 3 + 200), ("padded", 3 + 3 + 200)):
        settings = {"layout": layout, "max_samples": None, "cost": lambda sample: len(sample.tokens) + 100}
        assert ids_of(cut(samples, range(2), max_tokens=budget, **settings)) == [(0, 1)]  # type: ignore[arg-type]
        assert ids_of(cut(samples, range(2), max_tokens=budget - 1, **settings)) == [(0,), (1,)]  # type: ignore[arg-type]


def test_a_sample_over_the_budget_gets_its_own_pack() -> None:
    samples = [text(2), text(50), text(2)]
    packs = cut(samples, range(3), layout="packed", max_tokens=10, max_samples=None, cost=num_tokens)
    assert ids_of(packs) == [(0,), (1,), (2,)]


def test_the_number_of_samples_is_bounded_too() -> None:
    samples = [text(1)] * 5
    packs = cut(samples, range(5), layout="packed", max_tokens=100, max_samples=2, cost=num_tokens)
    assert ids_of(packs) == [(0, 1), (2, 3), (4,)]


def test_nothing_is_cut_into_nothing() -> None:
    assert cut([], [], layout="packed", max_tokens=10, max_samples=None, cost=num_tokens) == []
