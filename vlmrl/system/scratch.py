"""A private folder for a run's temporary files and sockets, removed at the end of the run. Standard library only.

Ray makes its session folder accessible to every user of the machine, and engines create sockets in the temporary
folder. Both are safe inside a folder that only this user may enter.
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

from vlmrl.errors import ClusterError

VARIABLE = "VLMRL_SCRATCH"
"""Environment variable: the folder that the processes of a run share. On other machines it may not exist yet."""
MEETING_FILE = "VLMRL_MEETING_FILE"
"""Environment variable: a file in that folder, the rendezvous of the training ranks of one machine."""
_PREFIX = "vlmrl-run-"
_LOCK = "lock"
_MAX_PARENT_CHARS = 22
"""Characters. The path of a socket has at most 107: Ray's part takes 66, and the folder's name 19."""
_YOUNG_S = 60.0
"""The age up to which a folder without a lock may belong to a run that is about to lock it."""
_END_S = 5.0

_held: dict[Path, int] = {}
"""The folders that this process uses -> the descriptors of their locks."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a private folder, and make it the temporary folder of this process and of those that it starts.

    It is removed at the end, once no process of the run uses it any more, or after five seconds. Folders of killed runs
    are removed at the start. Within the context of another call, the folder is that call's.

    Raises ClusterError when it cannot be created.
    """
    if _held:
        yield next(iter(_held))
        return
    before = {name: os.environ.get(name) for name in ("TMPDIR", VARIABLE)}
    parent = _parent()
    sweep(parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        enter(folder)
    except OSError as error:
        raise ClusterError(f"no folder for temporary files ({error}): set TMPDIR to one of yours") from error
    try:
        yield folder
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        _remove_folder_of_multiprocessing(folder)
        os.close(_held.pop(folder))
        stop = time.monotonic() + _END_S
        while _is_used(folder) and time.monotonic() < stop:
            time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_folder_of_multiprocessing(folder: Path) -> None:
    """Make multiprocessing remove its own folder inside this one now: at exit it would print a traceback."""
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is util._remove_temp_dir and Path(finalizer._args[-1]).is_relative_to(folder):  # type: ignore[attr-defined]
            # Another machine of the cluster may share the folder, and have removed it: multiprocessing would raise, and
            # use its folder again.
            Path(finalizer._args[-1]).mkdir(parents=True, exist_ok=True)
            finalizer()


def enter(folder: Path) -> None:
    """Make `folder` the temporary folder of this process and of those that it starts; create it if it does not exist.

    Raises OSError when it cannot be created, and PermissionError when it is not private to this user.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a private folder of this user")
    if folder not in _held:
        # Shared by all processes of the run on this machine; the kernel releases it however they end.
        _held[folder] = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(_held[folder], fcntl.LOCK_SH)
    os.environ |= {"TMPDIR": str(folder), VARIABLE: str(folder)}
    tempfile.tempdir = None  # clears its cache of the previous folder


def enter_from_environment() -> None:
    """Enter the folder that the environment names, if any; a new one if that folder is not this user's.

    On machines other than the driver's, the first process of a run removes the folders of killed runs.
    """
    if VARIABLE not in os.environ:
        return
    folder = _here(Path(os.environ[VARIABLE]))
    if not folder.exists():
        sweep(folder.parent)
    try:
        enter(folder)
    except PermissionError:  # processes of a cluster may run as another user than the driver
        enter(Path(tempfile.mkdtemp(prefix=_PREFIX)))


def remove_here(folder: Path) -> None:
    """Remove the folder of a run from a machine other than its driver's."""
    shutil.rmtree(_here(folder), ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove this user's folders in `parent` that no process uses, as killed runs leave them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process may remove it first
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_ours and time.time() - status.st_mtime > _YOUNG_S and not _is_used(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_used(folder: Path) -> bool:
    """Whether a process holds the folder's lock; True if that cannot be determined."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # for example too many open files
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _here(folder: Path) -> Path:
    """Return the path of the folder on this machine, whose temporary files may be elsewhere."""
    return folder if folder.parent.is_dir() else Path(tempfile.gettempdir()) / folder.name


def _parent() -> Path:
    """Return the folder of temporary files, or /tmp where Ray would not start: in paths that are too long or not
    ASCII."""
    preferred = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    fits = str(preferred).isascii() and len(str(preferred)) <= _MAX_PARENT_CHARS
    if fits or not os.access("/tmp", os.W_OK):
        return preferred
    return Path("/tmp")
