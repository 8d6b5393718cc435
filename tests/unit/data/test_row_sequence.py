from typing import Any

import pytest

from vlmrl.data.row_sequence import RowSequence


class Squares(RowSequence):
    """Rows with the squares of 0 to 4, which remember which of them were made."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return 5

    def _row(self, index: int) -> dict[str, Any]:
        number = range(5)[index]
        self.made.append(number)
        return {"square": number**2}


def test_a_slice_is_a_list_of_rows_and_makes_no_others() -> None:
    rows = Squares()
    assert rows[1:4:2] == [{"square": 1}, {"square": 9}]
    assert rows[-2:] == [{"square": 9}, {"square": 16}]
    assert rows.made == [1, 3, 3, 4]


def test_rows_are_counted_from_either_end() -> None:
    rows = Squares()
    assert (rows[2], rows[-5]) == ({"square": 4}, {"square": 0})
    assert [row["square"] for row in rows] == [0, 1, 4, 9, 16]
    with pytest.raises(IndexError):
        rows[5]
