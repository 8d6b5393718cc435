"""Disks that are full, read-only or damaged: room is checked before a write, and a write that fails is one line."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlmrl.errors import StorageError

_GIB, _MIB = 2**30, 2**20

_CURES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of the quota, or have it raised",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f unlimited`)",
    errno.EROFS: "mount it writable again (the kernel does this to a disk that fails: look at `dmesg`)",
    errno.EACCES: "give it the rights of the user who runs this",
    errno.EPERM: "give it the rights of the user who runs this",
    errno.EIO: "the disk or its server fails: look at `dmesg`",
    errno.ESTALE: "the file server has lost the folder: mount it again",
    errno.ENOENT: "the folder is gone: do not move or delete it while a run writes to it",
}
"""Error number -> what to do about it."""

_OF_LIBRARIES = re.compile(r"inline_container|PytorchStreamWriter|I/O error|write\(\): fd|Parent directory ")
"""What torch and safetensors say, in errors of their own kinds, when the system refuses a write."""

_PROBE = bytes(_MIB)


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Within the context `what` is written below `folder`; what the disk refuses is a StorageError of one line.

    Other errors pass as they are. The folder is there, or is made in the context.
    """
    try:
        yield
    except StorageError:  # it has its line already
        raise
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        reason = _reason(error, folder)
        if reason is None:
            raise
        why, cure = reason
        raise StorageError(f"{what} cannot be written to {folder}: {why}{_space(folder)}: {cure}") from error


def check_room(num_bytes: int, what: str, folder: Path, *, cure: str = "free some space there") -> None:
    """Raises StorageError where `folder`, or the nearest one above it, has no room for `num_bytes` more."""
    there = _nearest(folder)
    if shutil.disk_usage(there).free < num_bytes:
        raise StorageError(
            f"{what} takes about {amount(num_bytes)}, for which {there} has no room ({free_space(there)}): {cure}"
        )


def free_space(folder: Path) -> str:
    """`0.1 MiB of 4.0 GiB free`."""
    space = shutil.disk_usage(_nearest(folder))
    return f"{amount(space.free)} of {amount(space.total)} free"


def _space(folder: Path) -> str:
    """The same in brackets; nothing where a disk that fails does not even tell."""
    try:
        return f" ({free_space(folder)})"
    except OSError:
        return ""


def amount(num_bytes: float) -> str:
    """`1.5 GiB`, or in MiB where it is less than one GiB."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _reason(error: Exception, folder: Path) -> tuple[str, str] | None:
    """Why a write failed and what to do about it; None where the disk has nothing to do with it."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and _OF_LIBRARIES.search(str(error)):
        named = (known for known in _CURES if os.strerror(known) in str(error))
        number = next(named, None) or (_probed(folder) if folder.is_dir() else errno.ENOENT)
        if number is None:
            return f"the write was cut short: {' '.join(str(error).split())[:200]}", "look at the disk"
    if number not in _CURES or (number == errno.ENOENT and folder.is_dir()):
        return None
    return os.strerror(number), _CURES[number]


def _probed(folder: Path) -> int | None:
    """The number of the error that a small file meets in `folder`; None where it meets none.

    torch hides the system's error number. What it was writing still lies there, so that a full disk is still full.
    """
    probe = _nearest(folder) / f".probe_{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(_PROBE)
    except OSError as error:
        return error.errno
    finally:
        with suppress(OSError):  # where it could not be made it cannot be deleted either
            probe.unlink()
    has_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return errno.EFBIG if has_limit else None


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
