"""Checksums of a checkpoint's files: each rank writes and verifies those of its files, in parallel.

When a file is written, it is read once more while the kernel still caches it, at 3 to 10 GiB/s (XXH3, 128 bits): for a
checkpoint of 800 GiB, each of 64 ranks needs a few seconds. When a checkpoint is loaded, its files must be read anyway,
and come from the cache the second time. `xxh128sum -c checksums_rank_0.xxh128` verifies by hand. Checksums guard
against accidents, not against an adversary.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import xxhash

_SUFFIX = ".xxh128"
_REQUIRED = ("identity.json", "extra.json")
_CHUNK = 1 << 24
"""Bytes that are read at a time."""
_RANK = re.compile(r"rank_(\d+)")
"""The first match in a file's name is the rank that wrote it: `zero_pp_rank_3_mp_rank_00_model_states.pt`."""


def write_checksums(folder: Path, *, rank: int, num_ranks: int) -> None:
    """Flush this rank's files below `folder` to the disk, and write their checksums."""
    names = [name for name in _files(folder) if _owner(name, num_ranks) == rank and not name.endswith(_SUFFIX)]
    lines = [f"{_digest(folder / name, sync=True)}  {name}\n" for name in names]
    _list(folder, rank).write_text("".join(lines), encoding="utf-8")


def has_checksums(folder: Path) -> bool:
    """Whether the checkpoint has checksums: older versions of vlmrl wrote none."""
    return any(folder.glob(f"*{_SUFFIX}"))


def find_damage(folder: Path, *, rank: int, num_ranks: int) -> list[str]:
    """Verify this rank's share of the files; returns `name: reason` for each that is damaged.

    More or fewer ranks may verify a checkpoint than have written it. Without checksums, only the presence of the small
    files is checked.
    """
    if not has_checksums(folder):
        return [f"{name}: it is missing" for name in _REQUIRED if rank == 0 and not (folder / name).is_file()]
    damage: list[str] = []
    # Lists of ranks that this run does not have are shared out too.
    for number in range(rank, _num_lists(folder), num_ranks):
        damage += _verify(_list(folder, number))
    return damage


def _verify(listing: Path) -> list[str]:
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        return [f"{listing.name}: {_reason(error)}"]
    damage: list[str] = []
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{32})  (.+)", line)
        if match is None:
            return [*damage, f"{listing.name}: it is not a list of checksums"]
        digest, name = match.groups()
        try:
            if _digest(listing.parent / name) != digest:
                damage.append(f"{name}: its checksum differs")
        except OSError as error:
            damage.append(f"{name}: {_reason(error)}")
    # Every rank writes at least its random state.
    return damage if lines else [f"{listing.name}: it is empty"]


def _num_lists(folder: Path) -> int:
    """Return the number of lists that should exist, so that a lost list is noticed: one for each rank that has a file
    or that identity.json counts."""
    from_names = 1 + max(int(match[1]) for name in _files(folder) if (match := _RANK.search(name)))
    try:
        return max(from_names, int(json.loads((folder / "identity.json").read_text(encoding="utf-8"))["ranks"]))
    except (OSError, ValueError, KeyError, TypeError):  # damage of this file is found with the list of rank 0
        return from_names


def _owner(name: str, num_ranks: int) -> int:
    """Return the rank that verifies a file: the one that wrote it, whose machine may still cache it."""
    match = _RANK.search(Path(name).name)
    return int(match[1]) % num_ranks if match else 0


def _list(folder: Path, rank: int) -> Path:
    return folder / f"checksums_rank_{rank}{_SUFFIX}"


def _files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _digest(file: Path, *, sync: bool = False) -> str:
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as stream:
        if sync:
            os.fsync(stream.fileno())
        while count := stream.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    return f"it cannot be read: {error.strerror or error}" if isinstance(error, OSError) else "it cannot be read"
