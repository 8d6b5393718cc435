"""A journal after a kill at any byte holds exactly its complete batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.errors import StorageError
from vlmrl.system.journal import Journal


def written(path: Path) -> bytes:
    journal = Journal(path)
    journal.begin({"model": "m"})
    journal.append([{"row": 0}, {"row": 1}], position=2)
    journal.append([], position=4)  # a batch of dropped rows
    journal.append([{"row": 4, "text": "\ud800 \n}"}], position=5)
    return path.read_bytes()


def test_a_kill_at_any_byte_costs_only_the_batch_under_way(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole")
    ends = [0, *(position + 1 for position, byte in enumerate(whole) if byte == ord("\n"))]
    # Lines: header, two rows, end, end, row, end.
    complete = {ends[1]: (0, []), ends[4]: (2, [0, 1]), ends[5]: (4, [0, 1]), ends[7]: (5, [0, 1, 4])}
    for size in range(len(whole) + 1):
        path = tmp_path / f"cut_{size}"
        path.write_bytes(whole[:size])
        journal = Journal(path)
        last = max((end for end in complete if end <= size), default=None)
        if last is None:
            assert journal.header is None
            continue
        position, rows = complete[last]
        assert journal.header == {"model": "m"}
        assert journal.position == position
        assert [record["row"] for record in journal.records()] == rows
        journal.begin({"model": "m"})
        assert path.read_bytes() == whole[:last]
        journal.append([{"row": 9}], position=9)
        assert [record["row"] for record in Journal(path).records()] == [*rows, 9]


def test_zeros_after_a_power_cut_are_removed(tmp_path: Path) -> None:
    whole = written(tmp_path / "journal")
    (tmp_path / "journal").write_bytes(whole + b"\0" * 100 + b"\n")
    journal = Journal(tmp_path / "journal")
    assert journal.position == 5
    journal.begin({"model": "m"})
    assert (tmp_path / "journal").read_bytes() == whole


def test_texts_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path / "journal")
    assert [record["text"] for record in Journal(tmp_path / "journal").records() if "text" in record] == ["\ud800 \n}"]


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the folder is gone"):
        Journal(tmp_path / "gone" / "journal").begin({})
