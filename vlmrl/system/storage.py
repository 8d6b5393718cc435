"""Check room on disk before a write, and turn a failed write into a message of one line.

The error ends the run: `trainer/run_checkpoints.py` adds the checkpoint to resume from, `commands/exit_code.py` prints
it and returns 2.
"""

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

_HINTS = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of the quota, or have it raised",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f unlimited`)",
    errno.EROFS: "mount it writable again (the kernel makes a failing disk read-only: look at `dmesg`)",
    errno.EACCES: "give write permission to the user who runs this",
    errno.EPERM: "give write permission to the user who runs this",
    errno.EIO: "the disk or its server fails: look at `dmesg`",
    errno.ESTALE: "the file server has lost the folder: mount it again",
    errno.ENOENT: "the folder is gone: do not move or delete it while a run writes to it",
}
"""Error number -> what to do about it."""

_LIBRARY_ERRORS = re.compile(r"inline_container|PytorchStreamWriter|I/O error|write\(\): fd|Parent directory ")
"""Matches the messages of torch and safetensors for failed writes, which are not OSErrors."""

_PROBE = bytes(_MIB)


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turn disk errors within the context into a StorageError that says that `what` cannot be written to `folder`.

    Other errors pass unchanged. The folder exists, or is created within the context.
    """
    try:
        yield
    except StorageError:  # it has its message already
        raise
    except Exception as error:  # torch and safetensors raise their own errors for a full disk
        explanation = _explain(error, folder)
        if explanation is None:
            raise
        reason, hint = explanation
        raise StorageError(f"{what} cannot be written to {folder}: {reason}{_space_suffix(folder)}: {hint}") from error


def check_room(num_bytes: int, what: str, folder: Path, *, hint: str = "free some space there") -> None:
    """Raise StorageError if `folder`, or its nearest existing parent, has no room for `num_bytes` more."""
    existing = _nearest(folder)
    if shutil.disk_usage(existing).free < num_bytes:
        raise StorageError(
            f"{what} takes about {format_bytes(num_bytes)}, for which {existing} has no room "
            f"({free_space(existing)}): {hint}"
        )


def free_space(folder: Path) -> str:
    """Return the free space of a folder's disk, like `0.1 MiB of 4.0 GiB free`."""
    space = shutil.disk_usage(_nearest(folder))
    return f"{format_bytes(space.free)} of {format_bytes(space.total)} free"


def _space_suffix(folder: Path) -> str:
    """Return the free space in brackets; empty if the disk does not report it."""
    try:
        return f" ({free_space(folder)})"
    except OSError:
        return ""


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes like `1.5 GiB`, in MiB if it is less than one GiB."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _explain(error: Exception, folder: Path) -> tuple[str, str] | None:
    """Return the reason for a failed write, and what to do; None for an error that is not the disk's."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and _LIBRARY_ERRORS.search(str(error)):
        mentioned = (known for known in _HINTS if os.strerror(known) in str(error))
        number = next(mentioned, None) or (_probe(folder) if folder.is_dir() else errno.ENOENT)
        if number is None:
            return f"the write was cut short: {' '.join(str(error).split())[:200]}", "look at the disk"
    if number not in _HINTS or (number == errno.ENOENT and folder.is_dir()):
        return None
    return os.strerror(number), _HINTS[number]


def _probe(folder: Path) -> int | None:
    """Write a small file to `folder`; return the number of the error, None if it succeeds.

    torch hides the system's error number. Its incomplete file is still there, so a full disk is still full.
    """
    probe = _nearest(folder) / f".probe_{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(_PROBE)
    except OSError as error:
        return error.errno
    finally:
        with suppress(OSError):  # it may never have been created
            probe.unlink()
    has_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return errno.EFBIG if has_limit else None


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
