"""A file of your own: .jsonl, .json, .parquet, .csv or .tsv, with one row per question and columns set by `data.*_key`.

    vlmrl rl --data.prompt_dataset my_questions.jsonl ...

An image is a path (relative to the file's folder), base64 text, a data URL, a URL, or bytes in parquet.
"""

from __future__ import annotations

import codecs
import glob
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.data.row_sequence import RowSequence
from vlmrl.data.rows import FILE_SUFFIXES, Rows, columns_of, from_hugging_face
from vlmrl.data.table import Table
from vlmrl.errors import DataError
from vlmrl.plugins import first_line


def rows(*, path: str, split: str, seed: int) -> Rows:
    """Load the rows of the file at `path`. A .json file may hold one list per split; otherwise splits are ignored.

    Raises:
        DataError: the file is missing, empty or malformed.
    """
    del seed
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"dataset file {path} does not exist")
    if file.suffix not in FILE_SUFFIXES:
        raise DataError(f"dataset file {path}: its name must end in {', '.join(FILE_SUFFIXES)}")
    if file.stat().st_size == 0:
        raise DataError(f"dataset file {path} is empty")
    if file.suffix == ".parquet":
        return _parquet(file)
    if file.suffix in (".csv", ".tsv"):
        return _table(file)
    content: Sequence[Mapping[str, Any]] = _Lines(file) if file.suffix == ".jsonl" else _json(file, split)
    if len(content) == 0:
        raise DataError(f"dataset file {path} has no rows")
    columns = columns_of(content, f"dataset file {path}")
    return Rows(name=file.stem, rows=content, columns=columns, root=file.parent, files=(file,))


def _table(file: Path) -> Rows:
    table = Table(file)
    if len(table) == 0:
        raise DataError(f"dataset file {file} has no rows")
    return Rows(name=file.stem, rows=table, columns=table.columns, root=file.parent, files=(file,))


class _Lines(RowSequence):
    """Lines of a .jsonl file, read on demand, since a file with images may exceed memory."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with file.open("rb") as handle:
            if handle.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise DataError(
                    f"dataset file {file} is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8 {file} > NEW.jsonl)"
                )
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            spans = []
            start = 0
            while start < len(content):
                end = content.find(b"\n", start)
                end = len(content) if end < 0 else end
                if content[start:end].strip():
                    spans.append((start, end))
                start = end + 1
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._spans)

    def _row(self, index: int) -> dict[str, Any]:
        start, end = self._spans[index]
        with self._file.open("rb") as handle:
            handle.seek(start)
            line = handle.read(end - start)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._file}, row {index}: not JSON: {first_line(error)}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self._file}, row {index}: a JSON object is expected, not {type(row).__name__}")
        return row


def _json(file: Path, split: str) -> Sequence[dict[str, Any]]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        if file.read_bytes().lstrip().startswith(b"{") and "Extra data" in str(error):
            return _Lines(file)  # JSON lines under the suffix .json
        raise DataError(f"dataset file {file} is not JSON: {first_line(error)}") from error
    if isinstance(content, dict):
        splits = [key for key, value in content.items() if isinstance(value, list)]
        if split not in splits:
            hint = f": set data.prompt_split (or eval.split) to {splits[0]}" if splits else ""
            raise DataError(f"dataset file {file} has no split {split!r}; it has: {', '.join(splits) or 'none'}{hint}")
        content = content[split]
    # A single row that is not an object is dropped when it is drawn.
    if not isinstance(content, list) or (content and not any(isinstance(row, dict) for row in content)):
        raise DataError(f"dataset file {file}: a list of JSON objects is expected")
    return content


def _parquet(file: Path) -> Rows:
    import datasets

    try:
        # The library takes names as patterns: a[1].parquet would match a1.parquet.
        pattern = glob.escape(str(file.resolve()))
        data = datasets.load_dataset("parquet", data_files=pattern, split="train")
    except Exception as error:  # the library and Arrow raise many types on other files
        raise DataError(f"dataset file {file} is not a readable parquet file: {first_line(error)}") from error
    rows = from_hugging_face(file.stem, data)
    if len(rows) == 0:
        raise DataError(f"dataset file {file} has no rows")
    return replace(rows, root=file.parent, files=(file,))
