import pytest

from vlmrl.data.held_out import hold_out
from vlmrl.data.rows import Rows, first_rows
from vlmrl.errors import ConfigError


def numbered(count: int, name: str = "mine") -> Rows:
    return Rows(name=name, rows=[{"input": str(n)} for n in range(count)], columns=("input",))


def test_each_source_is_split_without_overlap() -> None:
    kept, held = hold_out([numbered(100, "a"), numbered(2, "b")], 0.1, seed=3)
    assert [len(rows) for rows in kept] == [90, 1]
    assert [len(rows) for rows in held] == [10, 1]
    for k, h in zip(kept, held, strict=True):
        numbers = [row["input"] for row in [*k, *h]]
        assert sorted(numbers, key=int) == [str(n) for n in range(len(numbers))]
        assert k.row_name(0) == f"{k.name}:{k[0]['input']}"
        assert h.row_name(len(h) - 1) == f"{h.name}:{h[-1]['input']}"
        assert [row["input"] for row in h] == sorted((row["input"] for row in h), key=int)
    assert len(first_rows(held[0], 4)) == 4


def test_the_split_follows_from_the_seed() -> None:
    def held_out(seed: int) -> list[str]:
        return [row["input"] for row in hold_out([numbered(100)], 0.1, seed=seed)[1][0]]

    assert held_out(1) == held_out(1) != held_out(2)


def test_a_source_of_one_row_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_fraction 0\.5 cannot hold out a row of dataset mine"):
        hold_out([numbered(1)], 0.5, seed=0)
