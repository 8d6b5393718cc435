"""Write rows to a JSON lines or Parquet file, which appears only when it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vlmrl.errors import DataError
from vlmrl.plugins import first_line
from vlmrl.system.storage import writing


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows to `path`, whose name ends in .jsonl or .parquet, and return their number.

    A file of that name is replaced. Without rows none is written, because no verb reads an empty one.

    Raises:
        StorageError: the file cannot be written.
        DataError: Parquet cannot hold these rows.
    """
    partial = path.with_name(f".{path.name}.tmp")
    with writing(path.name, path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        count = _write_lines(partial, rows)
        if path.suffix == ".parquet" and count:
            _convert_to_parquet(partial, path)
        if count:
            partial.replace(path)
        else:
            partial.unlink()
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


def _convert_to_parquet(file: Path, path: Path) -> None:
    """Replace a file of JSON lines by the same rows as Parquet."""
    import datasets

    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    except (ValueError, TypeError) as error:  # Arrow's errors: a column of texts and lists, say
        raise DataError(f"{path}: Parquet cannot hold these rows ({first_line(error)}): write a .jsonl file") from error
    table.to_parquet(str(file))
