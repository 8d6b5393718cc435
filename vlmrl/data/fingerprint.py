"""Whether a run that goes on reads the same data as before: rows, images and files, by their content."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from vlmrl.data.marks import FileMark, Marked, mark_file, spread

_ROWS_LOOKED_AT = 256
_ROWS_OF_GENERATED = 16
"""They follow from a seed and a few options."""
_LOOK_LIMIT_S = 3.0
"""For the rows of one dataset: some are drawn when they are asked for, or have their images on another machine."""
_MOST_NAMED = 3

Fingerprint = dict[str, Any]
"""As JSON: the dataset's name, its number of rows, the marks of its files and of some of its rows."""


def fingerprint(marked: Marked) -> Fingerprint:
    """By what this dataset is known again."""
    source = marked.rows
    most = _ROWS_OF_GENERATED if source.is_generated else _ROWS_LOOKED_AT
    deadline = time.monotonic() + _LOOK_LIMIT_S
    rows: dict[str, list[str] | None] = {}
    for row in spread(len(source), most):
        mark = marked.mark(row)
        rows[str(row)] = None if mark is None else list(mark)
        if time.monotonic() > deadline:
            break
    files = {str(file): mark_file(file, one_of=len(source.files)) for file in source.files}
    return {
        "name": source.name,
        "num_rows": len(source),
        "files": {file: None if mark is None else list(mark) for file, mark in files.items()},
        "rows": rows,
    }


def saved_in(data: Mapping[str, Any]) -> list[Fingerprint]:
    """The fingerprints in a checkpoint's state. Of a checkpoint that an older vlmrl has written, names and numbers of
    rows are all that can be compared."""
    if all(isinstance(one, Mapping) for one in data["datasets"]):
        return list(data["datasets"])
    pairs = zip(data["datasets"], data["rows"], strict=True)
    return [{"name": name, "num_rows": count, "files": {}, "rows": {}} for name, count in pairs]


class Differences(NamedTuple):
    """What two fingerprints do not have in common, by name."""

    sure: list[str]
    doubtful: list[str]
    """Files too large to be read in full that were written since: what was read of them is as before."""


def differences(saved: Sequence[Fingerprint], mine: Sequence[Fingerprint]) -> Differences:
    """What differs between the data of a checkpoint and those of now."""
    sure: list[str] = []
    doubtful: list[str] = []
    for old, new in zip_longest(saved, mine):
        if old is None or new is None:
            sure.append(f"{new['name']} was not there" if old is None else f"{old['name']} is missing")
            continue
        name = new["name"]
        if old["name"] != name:
            sure.append(f"{name} instead of {old['name']}")
            continue
        if old["num_rows"] != new["num_rows"]:
            sure.append(f"{name} has {new['num_rows']} rows instead of {old['num_rows']}")
        _compare_files(old["files"], new["files"], sure, doubtful)
        _compare_rows(name, old["rows"], new["rows"], sure)
    return Differences(sure, doubtful)


def _compare_files(old: Mapping[str, Any], new: Mapping[str, Any], sure: list[str], doubtful: list[str]) -> None:
    """By their place in the list: files may have moved."""
    for before, (path, after) in zip(old.values(), new.items(), strict=False):
        if before is None or after is None:
            continue
        one, other = FileMark(*before), FileMark(*after)
        if (one.size, one.digest) != (other.size, other.digest):
            sure.append(f"{path} has other content")
        elif not one.is_whole and one.time_ns != other.time_ns:
            doubtful.append(path)


def _compare_rows(name: str, old: Mapping[str, Any], new: Mapping[str, Any], sure: list[str]) -> None:
    different = [row for row in sorted(old.keys() & new.keys(), key=int) if old[row] != new[row]]
    named = [f"{name}:{row} ({_what(old[row], new[row])})" for row in different[:_MOST_NAMED]]
    if different:
        rest = len(different) - len(named)
        looked_at = len(old.keys() & new.keys())
        sure.append(
            f"of {looked_at} rows {', '.join(named)}{f' and {rest} more' if rest else ''} "
            f"{'differs' if len(different) == 1 else 'differ'}"
        )


def _what(old: Sequence[str] | None, new: Sequence[str] | None) -> str:
    if old is None or new is None:
        return "which can be read at one time only"
    return " and ".join(
        what for what, one, other in zip(("question", "label", "images"), old, new, strict=True) if one != other
    )
