"""Groups of ranks with the same packs."""

from typing import Any

from vlmrl.cluster.sequence_groups import each_group


class FakeRanks:
    """Six ranks, whose result is their number and their item."""

    def __len__(self) -> int:
        return 6

    def each(self, function: Any, items: list[Any]) -> list[Any]:
        assert len(items) == 6
        return [function(rank, item) for rank, item in enumerate(items)]


def test_consecutive_ranks_get_the_same_item_and_the_first_answers() -> None:
    ranks: Any = FakeRanks()
    # Two groups of three, three of two, and six of one.
    assert each_group(ranks, lambda rank, item: (rank, item), ["a", "b"]) == [(0, "a"), (3, "b")]
    assert each_group(ranks, lambda rank, item: (rank, item), [0, 1, 2]) == [(0, 0), (2, 1), (4, 2)]
    assert each_group(ranks, lambda rank, item: rank, [0] * 6) == [0, 1, 2, 3, 4, 5]
