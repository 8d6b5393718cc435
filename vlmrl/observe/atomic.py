"""Folders that are either whole or not there. Imports nothing heavy: the driver tidies checkpoints with it.

A folder is written under a temporary name, brought to the disk, and renamed. A run killed at any moment leaves either
the old folder or the new one, and perhaps a `.tmp` that nobody reads.
"""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

_PARTIAL = ".tmp"
_OLDER = f".old{_PARTIAL}"


def partial(folder: Path) -> Path:
    """The name under which `folder` is written until it is whole."""
    return folder.with_name(folder.name + _PARTIAL)


def begin(folder: Path) -> Path:
    """An empty folder to write to; what a killed run left under its name is gone."""
    path = partial(folder)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def finish(folder: Path) -> None:
    """Make what was written to `begin(folder)` be `folder`, in the place of any older one."""
    written = partial(folder)
    for path in sorted(written.rglob("*")):
        _sync(path)
    _sync(written)
    replace(folder, by=written)


def replace(folder: Path, *, by: Path) -> None:
    """Give the whole folder `by` the name `folder`, in the place of any older one."""
    older = _aside(folder) if folder.exists() else None
    try:
        by.rename(folder)
    except OSError:
        if older is not None:
            older.rename(folder)
        raise
    _sync(folder.parent)
    if older is not None:
        shutil.rmtree(older)


def remove(folder: Path) -> None:
    """Delete a folder so that half of it is never taken for all of it."""
    shutil.rmtree(_aside(folder))


def remove_partial(parent: Path, names: str = "*") -> list[Path]:
    """Delete what killed runs left half-written in `parent` of folders whose names match, and say what it was.

    What was killed between the two renames of `replace` is whole: it gets its name.
    """
    for older in parent.glob(f"{names}{_OLDER}"):
        folder = older.with_name(older.name.removesuffix(_OLDER))
        if not folder.exists() and partial(folder).exists():
            partial(folder).rename(folder)
    found = sorted({*parent.glob(f"{names}{_PARTIAL}"), *parent.glob(f"{names}{_OLDER}")})
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def set_aside(folder: Path) -> Path:
    """Give a damaged checkpoint a name that nobody takes for a checkpoint: `step_000012.damaged`."""
    free = (folder.with_name(f"{folder.name}.damaged{number or ''}") for number in count())
    return folder.rename(next(path for path in free if not path.exists()))


def checkpoints(parent: Path) -> list[Path]:
    """The whole checkpoints in `parent`, oldest first."""
    found = [p for p in parent.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def prune(parent: Path, *, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, and say which went."""
    doomed = checkpoints(parent)[:-keep]
    for path in doomed:
        remove(path)
    return doomed


def _aside(folder: Path) -> Path:
    path = folder.with_name(folder.name + _OLDER)
    shutil.rmtree(path, ignore_errors=True)
    folder.rename(path)
    return path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
