"""A file of JSON lines that is written batch by batch, and of which a kill at any point costs only the last batch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmrl.system.storage import writing

_END = "end_of_batch"
_HEADER = "header"


class Journal:
    """Batches of records behind a header. The line after each batch says where the next one begins.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Mapping[str, Any] | None = None
        """None: there is no such file, or its header was not completely written."""
        self.position = 0
        """Where the next batch begins, in units of the caller's."""
        self._end = 0
        """Bytes of the header and of all complete batches."""
        if path.is_file():
            self._find_end()

    def _find_end(self) -> None:
        offset = 0
        with self.path.open("rb") as lines:
            for line in lines:
                offset += len(line)
                record = _parse(line)
                if record is None:
                    return  # a kill cut this line
                if _HEADER in record:
                    self.header, self._end = record[_HEADER], offset
                elif self.header is None:
                    return
                elif _END in record:
                    self.position, self._end = record[_END], offset

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header of a new journal; of an existing one, remove what is behind its last complete batch.

        Raises:
            StorageError: the file cannot be written.
        """
        with writing(self.path.name, self.path.parent):
            if self.header is not None:
                os.truncate(self.path, self._end)
                return
            self.path.write_bytes(b"")
            self._append([{_HEADER: header}])
            self.header = header

    def append(self, records: Iterable[Mapping[str, Any]], *, position: int) -> None:
        """Write a batch, after which the next one begins at `position`; on return it is on disk.

        Raises:
            StorageError: the file cannot be written. A part of the batch may be in it, which the next run removes.
        """
        with writing(self.path.name, self.path.parent):
            self._append([*records, {_END: position}])
        self.position = position

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of all complete batches, in order."""
        if self.header is None:
            return
        offset = 0
        with self.path.open("rb") as lines:
            for line in lines:
                offset += len(line)
                if offset > self._end:
                    return
                record = json.loads(line)
                if _HEADER not in record and _END not in record:
                    yield record

    def _append(self, records: Iterable[Mapping[str, Any]]) -> None:
        # ASCII: a response may hold a lone surrogate, which UTF-8 cannot encode.
        content = "".join(json.dumps(record, default=str) + "\n" for record in records).encode("ascii")
        with self.path.open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._end += len(content)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if the line is not complete."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:  # also UnicodeDecodeError: blocks of zeros after a power cut
        return None
    return record if isinstance(record, dict) else None
