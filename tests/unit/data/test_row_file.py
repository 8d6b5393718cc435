"""Files of rows are complete or not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlmrl.data.row_file import write_rows
from vlmrl.data.rows import load_rows
from vlmrl.errors import DataError, StorageError

ROWS: list[dict[str, Any]] = [
    {"input": "a", "images": ["images/1.png"], "answer": "x\ny", "score": 1.0},
    {"input": [{"role": "user", "content": "b"}], "answer": "é"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_are_read_back(suffix: str, tmp_path: Path) -> None:
    rows = [{**row, "input": "text"} for row in ROWS] if suffix == "parquet" else ROWS
    file = tmp_path / "new" / f"rows.{suffix}"
    assert write_rows(file, rows) == 2
    read = list(load_rows(str(file), split="train", max_samples=9, seed=0))
    assert [{name: value for name, value in row.items() if value is not None} for row in read] == rows
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, ROWS)
    before = file.read_bytes()

    def broken() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(file, broken())
    assert file.read_bytes() == before


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    assert write_rows(tmp_path / "rows.jsonl", []) == 0
    assert not list(tmp_path.iterdir())


def test_a_column_of_texts_and_messages_does_not_fit_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Parquet cannot hold these rows .*: write a \.jsonl file"):
        write_rows(tmp_path / "rows.parquet", [ROWS[1], ROWS[0]])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((StorageError, NotADirectoryError, FileExistsError)):
        write_rows(tmp_path / "file" / "rows.jsonl", ROWS)
