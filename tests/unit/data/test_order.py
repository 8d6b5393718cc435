from collections import Counter

import pytest

from vlmrl.data.order import RowOrder


def test_every_episode_permutes_the_pool_of_all_sources() -> None:
    order = RowOrder([3, 4], None, seed=0)
    indices = [order.at(k) for k in range(21)]
    for episode in range(3):
        assert sorted(indices[7 * episode : 7 * episode + 7]) == [
            (0, 0),
            (0, 1),
            (0, 2),
            (1, 0),
            (1, 1),
            (1, 2),
            (1, 3),
        ]
    assert indices[:7] != indices[7:14]


def test_rows_can_be_computed_in_any_order() -> None:
    for probs in (None, [0.9, 0.1]):
        forwards, backwards = RowOrder([5, 30], probs, seed=2), RowOrder([5, 30], probs, seed=2)
        assert [forwards.at(k) for k in range(3000)] == [backwards.at(k) for k in reversed(range(3000))][::-1]


def test_shares_are_respected_and_each_source_has_its_own_episodes() -> None:
    order = RowOrder([10, 4], [3.0, 1.0], seed=1)
    indices = [order.at(k) for k in range(4000)]
    counts = Counter(source for source, _ in indices)
    assert counts[0] / 4000 == pytest.approx(0.75, abs=0.03)
    second = [row for source, row in indices if source == 1]
    for start in range(0, len(second) - 4, 4):
        assert sorted(second[start : start + 4]) == [0, 1, 2, 3]


def test_the_order_follows_from_the_seed() -> None:
    assert [RowOrder([50], None, seed=1).at(k) for k in range(50)] != [
        RowOrder([50], None, seed=2).at(k) for k in range(50)
    ]
    assert RowOrder([50], None, seed=-1).at(0)  # a negative seed is a seed
