"""Write rows to a JSON lines or Parquet file, which appears only when it is complete. Only a batch of rows is in
memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import DataError
from vlmrl.plugins import first_line
from vlmrl.system.storage import writing

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 1024
"""Rows that are converted to Parquet together, a row group of the file."""


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows to `path`, whose name ends in .jsonl or .parquet, and return their number.

    A file of that name is replaced. Without rows none is written, because no verb reads an empty one.

    Raises:
        StorageError: the file cannot be written.
        DataError: Parquet cannot hold these rows.
    """
    with writing(path.name, path.parent), ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, table = (path.with_name(f".{path.name}{suffix}") for suffix in (".tmp", ".table.tmp"))
        for file in (lines, table):
            stack.callback(file.unlink, missing_ok=True)
        count = _write_lines(lines, rows)
        if not count:
            return 0
        if path.suffix == ".parquet":
            # The rows are read twice more: Parquet needs all columns with their types before the first row.
            _write_parquet(lines, table, name=path)
            table.replace(path)
        else:
            lines.replace(path)
    return count


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    # A response may hold a lone surrogate, which UTF-8 cannot encode; its backslash escape is valid JSON.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
        lines.flush()
        os.fsync(lines.fileno())
    return count


def _write_parquet(lines: Path, table: Path, *, name: Path) -> None:
    """Write the rows of a file of JSON lines to a Parquet file; `name` is its final one, for messages."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    try:
        schema = _schema(lines)
        with table.open("wb") as file:
            with ParquetWriter(file, schema) as writer:
                for rows in _batches(lines):
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            file.flush()
            os.fsync(file.fileno())
    except (ValueError, TypeError, OverflowError) as error:  # Arrow's errors: a column of texts and lists, say
        raise DataError(f"{name}: Parquet cannot hold these rows ({first_line(error)}): write a .jsonl file") from error


def _schema(lines: Path) -> pa.Schema:
    """Return the columns of all rows, in the order of their first appearance, each with a type for all its values."""
    import pyarrow as pa

    schema = pa.schema([])
    for rows in _batches(lines):
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
    return schema


def _batches(lines: Path) -> Iterator[list[dict[str, Any]]]:
    with lines.open(encoding="utf-8") as file:
        while rows := [json.loads(line) for line in islice(file, _BATCH_ROWS)]:
            yield rows
