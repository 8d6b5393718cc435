"""Files of rows are complete or not there."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from vlmrl.data import row_file
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


def test_parquet_has_the_rows_of_json_lines_whatever_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns, and fields of a column, appear late, are empty at first, or are whole numbers at first."""
    monkeypatch.setattr(row_file, "_BATCH_ROWS", 3)
    rows: list[dict[str, Any]] = [
        {
            "answer": f"{i} \u2028 é\n",
            "images": [] if i < 4 else [f"images/{i}.png"],
            "label": i if i < 5 else i + 0.5,
            "expected": None if i < 7 else "late",
            "extra": {"a": i} if i < 5 else {"a": i, "b": ["x"]},
        }
        | ({"truncated": True} if i == 7 else {})
        for i in range(8)
    ]
    for suffix in ("jsonl", "parquet"):
        assert write_rows(tmp_path / f"rows.{suffix}", iter(rows)) == 8
    with (tmp_path / "rows.jsonl").open() as lines:
        written = [json.loads(line) for line in lines]
    read = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [_without_none(row) for row in read] == [_without_none(row) for row in written]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "rows.parquet"}


def _without_none(value: Any) -> Any:
    """Parquet has the same fields in all rows: None is a missing one."""
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return value


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_part_of_the_rows_is_in_memory(suffix: str, tmp_path: Path) -> None:
    num_rows, num_bytes = 10_000, 2_000
    rows = ({"answer": f"{i} ".ljust(num_bytes)} for i in range(num_rows))
    write_rows(tmp_path / f"warm.{suffix}", [{"answer": ""}])  # imports
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    write_rows(tmp_path / f"rows.{suffix}", rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < num_rows * num_bytes / 2
    assert pa.total_allocated_bytes() - before < num_rows * num_bytes / 2


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
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    assert write_rows(tmp_path / "rows.jsonl", []) == 0
    assert not list(tmp_path.iterdir())


def test_a_column_of_texts_and_messages_does_not_fit_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"Parquet cannot hold these rows .*: write a \.jsonl file"):
        write_rows(tmp_path / "rows.parquet", [ROWS[1], ROWS[0]])
    monkeypatch.setattr(row_file, "_BATCH_ROWS", 1)
    with pytest.raises(DataError, match=r"Parquet cannot hold these rows .*: write a \.jsonl file"):
        write_rows(tmp_path / "rows.parquet", [ROWS[1], ROWS[0]])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((StorageError, NotADirectoryError, FileExistsError)):
        write_rows(tmp_path / "file" / "rows.jsonl", ROWS)
