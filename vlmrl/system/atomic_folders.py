"""Write and replace folders atomically. Imports nothing heavy, since the driver cleans up checkpoints with it.

A folder is written under a temporary name, synced to disk, and renamed. A run killed at any moment leaves either the
old folder or the new one, and perhaps a `.tmp` that is never read.
"""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

_PARTIAL = ".tmp"
_OLDER = f".old{_PARTIAL}"


def partial(folder: Path) -> Path:
    """Return the name under which `folder` is written until it is complete."""
    return folder.with_name(folder.name + _PARTIAL)


def begin(folder: Path) -> Path:
    """Make an empty folder to write to, in place of one that a killed run left."""
    path = partial(folder)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def finish(folder: Path) -> None:
    """Sync the files written to `begin(folder)` and move them to `folder`, replacing an older one."""
    written = partial(folder)
    for path in sorted(written.rglob("*")):
        _sync(path)
    _sync(written)
    replace(folder, by=written)


def replace(folder: Path, *, by: Path) -> None:
    """Rename the complete folder `by` to `folder`, replacing an older one."""
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
    """Delete a folder after renaming it, so that a partly deleted one is never used."""
    shutil.rmtree(_aside(folder))


def remove_partial(parent: Path, names: str = "*") -> list[Path]:
    """Delete the incomplete folders that killed runs left in `parent`, for matching names, and return their paths.

    A folder whose run was killed between the two renames of `replace` is complete, and gets its final name.
    """
    for older in parent.glob(f"{names}{_OLDER}"):
        folder = older.with_name(older.name.removesuffix(_OLDER))
        if not folder.exists() and partial(folder).exists():
            partial(folder).rename(folder)
    leftovers = sorted({*parent.glob(f"{names}{_PARTIAL}"), *parent.glob(f"{names}{_OLDER}")})
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return leftovers


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is not loaded again: `step_000012.damaged`."""
    free = (folder.with_name(f"{folder.name}.damaged{number or ''}") for number in count())
    return folder.rename(next(path for path in free if not path.exists()))


def checkpoints(parent: Path) -> list[Path]:
    """Return the complete checkpoints in `parent`, oldest first."""
    folders = [p for p in parent.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit()]
    return sorted(folders, key=lambda p: int(p.name.removeprefix("step_")))


def prune(parent: Path, *, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints and return the deleted ones."""
    outdated = checkpoints(parent)[:-keep]
    for path in outdated:
        remove(path)
    return outdated


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
