from pathlib import Path

import pytest

from vlmrl.data.rows import load_rows
from vlmrl.data.table import Table
from vlmrl.errors import DataError


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t")])
def test_cells_are_text_or_json_lists(tmp_path: Path, name: str, delimiter: str) -> None:
    lines = [
        ["input", "label", "images"],
        ['"two, or; 2?\nSay ""so"""', "007", '"[""a.png"", ""b.png""]"'],
        ["q", "", "c.png"],
    ]
    (tmp_path / name).write_text(
        "\ufeff" + "\r\n".join(delimiter.join(line) for line in lines) + "\r\n", encoding="utf-8"
    )
    rows = load_rows(str(tmp_path / name), split="train", max_samples=9, seed=0)
    assert rows.columns == ("input", "label", "images")
    assert rows.root == tmp_path
    assert list(rows) == [
        {"input": 'two, or; 2?\nSay "so"', "label": "007", "images": ["a.png", "b.png"]},
        {"input": "q", "label": None, "images": "c.png"},
    ]


def test_a_tsv_is_separated_by_tabs_whatever_its_names_contain(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("input (a, b, or c)\tlabel\nq, r\t3\n")
    assert list(Table(tmp_path / "a.tsv")) == [{"input (a, b, or c)": "q, r", "label": "3"}]


def test_only_the_row_of_the_wrong_length_is_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('input,label\n1 + 1?,2\n1, 2?,3\n[1] + [2],"[1, 2)"\n')
    table = Table(file)
    assert [table[0]["label"], table[2]["label"]] == ["2", "[1, 2)"]
    with pytest.raises(DataError, match=r"a\.csv, row 1: 3 cells for 2 columns"):
        table[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"input,label\n", "has no rows"),
        (b"input,\n1,2\n", "first line must name the columns"),
        (b"a,a\n1,2\n", "first line must name the columns"),
        ("input,label\né,1\n".encode("utf-16"), "is not UTF-8"),
        (b'input,label\n"open,1\nb,2\n', "line 3, cannot be parsed: unexpected end of data"),
        (b'input,label\na,1\n"Hi" he said,2\n', "line 3, cannot be parsed: ',' expected after '\"'; a cell that"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(str(tmp_path / "a.csv"), split="train", max_samples=9, seed=0)
    assert "\n" not in str(caught.value)
