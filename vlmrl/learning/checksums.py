"""Checksums of a checkpoint's files: each rank writes and verifies those of its own, side by side.

A file is read once more while the kernel still holds it, at 3 to 10 GiB/s (XXH3, 128 bits): a checkpoint of 800 GiB
takes each of 64 ranks a few seconds when it is written. When it is loaded its files must be read anyway, and come from
memory the second time. `xxh128sum -c checksums_rank_0.xxh128` verifies by hand. Checksums guard against accidents, not
against an adversary.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import xxhash

_ENDING = ".xxh128"
_ALWAYS = ("identity.json", "extra.json")
_CHUNK = 1 << 24
"""Bytes that are read at a time."""
_RANK = re.compile(r"rank_(\d+)")
"""The first in a file's name is the rank that wrote it, as in `zero_pp_rank_3_mp_rank_00_model_states.pt`."""


def write_checksums(folder: Path, *, rank: int, num_ranks: int) -> None:
    """Bring what this rank has written below `folder` to the disk, and write down its checksums."""
    names = [name for name in _files(folder) if _owner(name, num_ranks) == rank and not name.endswith(_ENDING)]
    lines = [f"{_digest(folder / name, sync=True)}  {name}\n" for name in names]
    _list(folder, rank).write_text("".join(lines), encoding="utf-8")


def has_checksums(folder: Path) -> bool:
    """Whether the checkpoint was written with checksums: older versions of vlmrl had none."""
    return any(folder.glob(f"*{_ENDING}"))


def damage(folder: Path, *, rank: int, num_ranks: int) -> list[str]:
    """What is wrong with the files that are this rank's to verify, one `name: why` each.

    The ranks may be other ones, and more or fewer, than those which wrote them. Of a checkpoint without checksums it is
    asked whether its small files are there.
    """
    if not has_checksums(folder):
        return [f"{name}: it is gone" for name in _ALWAYS if rank == 0 and not (folder / name).is_file()]
    found: list[str] = []
    # The lists of ranks that are gone are somebody's, too.
    for number in range(rank, _num_lists(folder), num_ranks):
        found += _damage_of(_list(folder, number))
    return found


def _damage_of(listing: Path) -> list[str]:
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        return [f"{listing.name}: {_reason(error)}"]
    found: list[str] = []
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{32})  (.+)", line)
        if match is None:
            return [*found, f"{listing.name}: it is no list of checksums"]
        digest, name = match.groups()
        try:
            if _digest(listing.parent / name) != digest:
                found.append(f"{name}: its checksum differs")
        except OSError as error:
            found.append(f"{name}: {_reason(error)}")
    # Each rank has written random numbers at least, and rank 0 what the checkpoint is of.
    return found if lines else [f"{listing.name}: it is empty"]


def _num_lists(folder: Path) -> int:
    """Lists that should be there: one for each rank that has any file, or is counted in what the checkpoint is of, so
    that a list which is gone is missed."""
    seen = 1 + max(int(match[1]) for name in _files(folder) if (match := _RANK.search(name)))
    try:
        return max(seen, int(json.loads((folder / "identity.json").read_text(encoding="utf-8"))["ranks"]))
    except (OSError, ValueError, KeyError, TypeError):  # the list of rank 0 tells whether it is damaged
        return seen


def _owner(name: str, num_ranks: int) -> int:
    """Which rank sees to a file: the one that wrote it, so that it lies in that machine's memory."""
    match = _RANK.search(Path(name).name)
    return int(match[1]) % num_ranks if match else 0


def _list(folder: Path, rank: int) -> Path:
    return folder / f"checksums_rank_{rank}{_ENDING}"


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
        return "it is gone"
    return f"it cannot be read: {error.strerror or error}" if isinstance(error, OSError) else "it cannot be read"
