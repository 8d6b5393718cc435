"""A private folder for a run's temporary files and sockets, gone when the run has ended. Standard library only.

Ray opens its session folder to every user of the machine, and engines leave sockets in the temporary folder. Below a
folder that this user alone may enter, neither matters.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path

VARIABLE = "VLMRL_SCRATCH"
"""Environment variable: the folder that the processes of a run share. It may have to be made on other machines."""
MEETING_FILE = "VLMRL_MEETING_FILE"
"""Environment variable: a file below it, in which the training ranks of one machine meet."""
_PREFIX = "vlmrl-run-"
_LOCK = "lock"
_LONGEST_PARENT = 22
"""Characters. The path of a socket has at most 107: Ray's takes 66, and the folder's name 19."""
_YOUNG_S = 60.0
"""A folder may be so old before its run holds the lock."""
_END_S = 5.0

_held: dict[Path, int] = {}
"""The folders that this process uses, with the descriptor of each one's lock."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, open to this user alone, as the temporary folder of this process and of those it starts.

    At the end it is removed, as soon as no process of the run uses it any more, or after five seconds. Folders of runs
    that were killed are removed at the start.

    Raises OSError when it cannot be made.
    """
    before = {name: os.environ.get(name) for name in ("TMPDIR", VARIABLE)}
    parent = _parent()
    sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    enter(folder)
    try:
        yield folder
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        _forget_that_of_multiprocessing(folder)
        os.close(_held.pop(folder))
        stop = time.monotonic() + _END_S
        while _is_used(folder) and time.monotonic() < stop:
            time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)


def _forget_that_of_multiprocessing(folder: Path) -> None:
    """Have it remove its own folder below this one now: at the process's end it would print a traceback."""
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is util._remove_temp_dir and Path(finalizer._args[-1]).is_relative_to(folder):  # type: ignore[attr-defined]
            finalizer()


def enter(folder: Path) -> None:
    """Make `folder` the temporary folder of this process and of those it starts; make it where it is not there.

    Raises OSError when it cannot be made, and PermissionError when it is not private to this user.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that belongs to this user alone")
    if folder not in _held:
        # Shared by all processes of the run on this machine; the kernel lets go of it however they end.
        _held[folder] = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(_held[folder], fcntl.LOCK_SH)
    os.environ |= {"TMPDIR": str(folder), VARIABLE: str(folder)}
    tempfile.tempdir = None  # it remembers the folder of before


def enter_that_of_the_run() -> None:
    """Do so with the folder that the environment names, if any; with a new one where that is not this user's.

    The first process of a run on a machine that is not its driver's removes what killed runs have left there.
    """
    if VARIABLE not in os.environ:
        return
    folder = _here(Path(os.environ[VARIABLE]))
    if not folder.exists():
        sweep(folder.parent)
    try:
        enter(folder)
    except PermissionError:  # a cluster's processes may have another user than the driver
        enter(Path(tempfile.mkdtemp(prefix=_PREFIX)))


def remove_here(folder: Path) -> None:
    """Remove what processes of a run have left on another machine than its driver's."""
    shutil.rmtree(_here(folder), ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove this user's folders in `parent` that no process uses, as a run leaves one that was killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # Whoever is not the owner cannot, and whoever is a moment late finds nothing.
        with suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if is_ours and time.time() - found.st_mtime > _YOUNG_S and not _is_used(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_used(folder: Path) -> bool:
    """Whether a process holds the folder's lock, or it cannot be known."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _here(folder: Path) -> Path:
    """The folder on this machine, which may have its temporary files elsewhere."""
    return folder if folder.parent.is_dir() else Path(tempfile.gettempdir()) / folder.name


def _parent() -> Path:
    """Where temporary files go; /tmp where that path is too long for sockets below it, or is not ASCII: Ray does not
    start there."""
    wanted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    fits = str(wanted).isascii() and len(str(wanted)) <= _LONGEST_PARENT
    if fits or not os.access("/tmp", os.W_OK):
        return wanted
    return Path("/tmp")
