"""Rows of a .csv or .tsv file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from vlmrl.data.row_sequence import RowSequence
from vlmrl.errors import DataError

_DELIMITERS = ",;\t"
_MAX_CELL_CHARS = 2**28
"""A cell may hold an image in base64."""


class Table(RowSequence):
    """Rows of a table whose first line names the columns. Cells are text or JSON lists and objects, or None.

    The delimiter of a .tsv file is the tab; otherwise it is the comma, semicolon or tab, whichever is most frequent in
    the first line.

    Raises:
        DataError: the file is not a table in UTF-8 or does not name its columns; for a malformed row, when it is read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        csv.field_size_limit(_MAX_CELL_CHARS)
        try:
            # utf-8-sig skips the byte order mark that Excel writes before the first column's name.
            with file.open(encoding="utf-8-sig", newline="") as handle:
                first = handle.readline()
                handle.seek(0)
                delimiter = "\t" if file.suffix == ".tsv" else max(_DELIMITERS, key=first.count)
                reader = csv.reader(handle, delimiter=delimiter, strict=True)
                lines = [line for line in reader if line]
        except csv.Error as error:
            raise DataError(
                f"dataset file {file}, line {reader.line_num}, cannot be parsed: {error}; a cell that begins "
                "with a quotation mark must end with one, and quotation marks inside it are doubled"
            ) from error
        except UnicodeDecodeError as error:
            raise DataError(f"dataset file {file} is not UTF-8: {error}") from error
        self.columns = tuple(name.strip() for name in lines[0]) if lines else ()
        if not all(self.columns) or len(set(self.columns)) < len(self.columns):
            raise DataError(f"dataset file {file}: the first line must name the columns, each once")
        self._lines = lines[1:]

    def __len__(self) -> int:
        return len(self._lines)

    def _row(self, index: int) -> dict[str, Any]:
        cells = self._lines[index]
        if len(cells) != len(self.columns):
            raise DataError(f"{self._file}, row {index}: {len(cells)} cells for {len(self.columns)} columns")
        return {name: _cell(text) for name, text in zip(self.columns, cells, strict=True)}


def _cell(text: str) -> Any:
    """Parse a cell: lists and objects are JSON, but a label such as `[1, 2)` stays text."""
    if not text:
        return None
    if text.lstrip().startswith(("[{", '["', '{"')):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text
