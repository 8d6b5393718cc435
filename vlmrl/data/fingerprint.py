"""Fingerprints of datasets, which show whether a resumed run reads the same rows, images and files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from vlmrl.data.digests import FileDigest, RowDigest, RowHasher, digest_file, spaced_indices

_NUM_ROWS = 256
_NUM_GENERATED_ROWS = 16
"""Fewer, since generated rows follow from a seed and a few options."""
_LIMIT_S = 3.0
"""Seconds for the rows of one dataset, which may be generated on demand or read from another machine."""
_MAX_NAMED = 3

Fingerprint = dict[str, Any]
"""JSON object: the dataset's name, its number of rows, and the digests of its files and of some of its rows."""


def fingerprint(hasher: RowHasher) -> Fingerprint:
    """Compute the fingerprint of a dataset."""
    source = hasher.rows
    limit = _NUM_GENERATED_ROWS if source.is_generated else _NUM_ROWS
    deadline = time.monotonic() + _LIMIT_S
    rows: dict[str, list[str] | None] = {}
    for row in spaced_indices(len(source), limit):
        digest = hasher.digest(row)
        rows[str(row)] = None if digest is None else list(digest)
        if time.monotonic() > deadline:
            break
    files = {str(file): digest_file(file, num_files=len(source.files)) for file in source.files}
    return {
        "name": source.name,
        "num_rows": len(source),
        "files": {file: None if digest is None else list(digest) for file, digest in files.items()},
        "rows": rows,
    }


def checkpoint_fingerprints(data: Mapping[str, Any]) -> list[Fingerprint]:
    """Return the fingerprints in a checkpoint's state; an older vlmrl saved only names and numbers of rows."""
    if all(isinstance(saved, Mapping) for saved in data["datasets"]):
        return list(data["datasets"])
    pairs = zip(data["datasets"], data["rows"], strict=True)
    return [{"name": name, "num_rows": count, "files": {}, "rows": {}} for name, count in pairs]


class Differences(NamedTuple):
    """Differences between the fingerprints of two runs, for messages."""

    certain: list[str]
    possible: list[str]
    """Files modified since, of which only blocks were read, and those have not changed."""


def compare(saved: Sequence[Fingerprint], current: Sequence[Fingerprint]) -> Differences:
    """Compare the fingerprints of a checkpoint with the current ones."""
    certain: list[str] = []
    possible: list[str] = []
    for old, new in zip_longest(saved, current):
        if old is None or new is None:
            certain.append(f"{new['name']} is new" if old is None else f"{old['name']} is missing")
            continue
        name = new["name"]
        if old["name"] != name:
            certain.append(f"{name} instead of {old['name']}")
            continue
        if old["num_rows"] != new["num_rows"]:
            certain.append(f"{name} has {new['num_rows']} rows instead of {old['num_rows']}")
        _compare_files(old["files"], new["files"], certain, possible)
        _compare_rows(name, old["rows"], new["rows"], certain)
    return Differences(certain, possible)


def _compare_files(old: Mapping[str, Any], new: Mapping[str, Any], certain: list[str], possible: list[str]) -> None:
    """Compare files by their position in the list, since paths may have changed."""
    for before, (path, after) in zip(old.values(), new.items(), strict=False):
        if before is None or after is None:
            continue
        saved, current = FileDigest(*before), FileDigest(*after)
        if (saved.size, saved.digest) != (current.size, current.digest):
            certain.append(f"{path} has different content")
        elif not saved.is_whole and saved.time_ns != current.time_ns:
            possible.append(path)


def _compare_rows(name: str, old: Mapping[str, Any], new: Mapping[str, Any], certain: list[str]) -> None:
    compared = sorted(old.keys() & new.keys(), key=int)
    different = {row: parts for row in compared if (parts := _changed_parts(old[row], new[row]))}
    examples = [f"{name}:{row} ({parts})" for row, parts in list(different.items())[:_MAX_NAMED]]
    if different:
        rest = len(different) - len(examples)
        certain.append(
            f"of {len(compared)} rows {', '.join(examples)}{f' and {rest} more' if rest else ''} "
            f"{'differs' if len(different) == 1 else 'differ'}"
        )


def _changed_parts(old: Sequence[str] | None, new: Sequence[str] | None) -> str:
    """Name the parts of a row whose digests differ; an older vlmrl saved only the first three."""
    if old is None or new is None:
        return "" if old == new else "readable in only one of the two runs"
    parts = [name.replace("others", "other columns") for name in RowDigest._fields]
    return " and ".join(part for part, before, after in zip(parts, old, new, strict=False) if before != after)
