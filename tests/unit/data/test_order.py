from collections import Counter

import pytest

from vlmrl.data.order import Order


def test_every_episode_is_a_permutation_of_all_sources_together() -> None:
    order = Order([3, 4], None, seed=0)
    places = [order.place(k) for k in range(21)]
    for episode in range(3):
        assert sorted(places[7 * episode : 7 * episode + 7]) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert places[:7] != places[7:14]


def test_a_place_can_be_asked_for_in_any_order() -> None:
    for probs in (None, [0.9, 0.1]):
        forwards, backwards = Order([5, 30], probs, seed=2), Order([5, 30], probs, seed=2)
        assert [forwards.place(k) for k in range(3000)] == [backwards.place(k) for k in reversed(range(3000))][::-1]


def test_shares_are_kept_and_each_source_goes_through_its_own_episodes() -> None:
    order = Order([10, 4], [3.0, 1.0], seed=1)
    places = [order.place(k) for k in range(4000)]
    counts = Counter(source for source, _ in places)
    assert counts[0] / 4000 == pytest.approx(0.75, abs=0.03)
    second = [row for source, row in places if source == 1]
    for start in range(0, len(second) - 4, 4):
        assert sorted(second[start : start + 4]) == [0, 1, 2, 3]


def test_the_seed_decides() -> None:
    assert [Order([50], None, seed=1).place(k) for k in range(50)] != [
        Order([50], None, seed=2).place(k) for k in range(50)
    ]
    assert Order([50], None, seed=-1).place(0)  # a negative seed is a seed
