"""The rows of a .csv or .tsv file."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from vlmrl.errors import DataError

_DELIMITERS = ",;\t"
_LONGEST_CELL = 2**28
"""Characters; a cell may hold an image in base64."""


class Table(Sequence[Mapping[str, Any]]):
    """Rows with the columns that the first line names; cells are text, `[` and `{` begin JSON, an empty one is None.

    Tabs stand between the cells of a .tsv file; of another, commas, semicolons or tabs: whichever the first line has
    most of.
    Raises DataError when the file is no text in UTF-8 or names no columns; for a single row when it is asked for.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        csv.field_size_limit(_LONGEST_CELL)
        try:
            # The mark that Excel puts in front is not part of the first column's name.
            with file.open(encoding="utf-8-sig", newline="") as handle:
                first = handle.readline()
                handle.seek(0)
                delimiter = "\t" if file.suffix == ".tsv" else max(_DELIMITERS, key=first.count)
                reader = csv.reader(handle, delimiter=delimiter, strict=True)
                lines = [line for line in reader if line]
        except csv.Error as error:
            raise DataError(
                f"dataset file {file}, line {reader.line_num}, is no line of a table: {error}; a cell that begins "
                "with a quotation mark ends with one, and those inside are doubled"
            ) from error
        except UnicodeDecodeError as error:
            raise DataError(f"dataset file {file} is not a table in UTF-8 that can be read: {error}") from error
        self.columns = tuple(name.strip() for name in lines[0]) if lines else ()
        if not all(self.columns) or len(set(self.columns)) < len(self.columns):
            raise DataError(f"dataset file {file}: its first line should name the columns, each once")
        self._lines = lines[1:]

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        cells = self._lines[index]
        if len(cells) != len(self.columns):
            raise DataError(f"{self._file}, row {index}: {len(cells)} cells for {len(self.columns)} columns")
        return {name: _cell(text) for name, text in zip(self.columns, cells, strict=True)}


def _cell(text: str) -> Any:
    """Lists of messages and of images are JSON in a table; a label such as `[1, 2)` is what it says."""
    if not text:
        return None
    if text.lstrip().startswith(("[{", '["', '{"')):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text
