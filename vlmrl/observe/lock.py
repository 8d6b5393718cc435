"""One run at a time in an output folder: a lock that is held for the run's length, on shared file systems too.

A file names host, process and since when. On its own machine a lock is stale when that process is no more. From another
machine, or another container, nobody sees processes: there a lock is stale when its holder has not touched it for a
while, as the one who waits sees it. No two clocks are compared.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vlmrl.errors import ConfigError

NAME = "run.lock"
_BEAT_S = 5.0
"""Between two touches of a lock that is held."""
_STALE_S = 30.0
"""A lock of another machine that nobody has touched for so long is stale. A server may be slow, six times in a row."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock."""

    host: str
    machine: str
    """Boot of the machine and namespace of its processes: within one of these, process ids mean the same."""
    pid: int
    started: str
    """Of the process, so that another one with its id is not taken for it."""
    since: str
    """When it took the lock, by its own clock."""
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_gone(self) -> bool | None:
        """Whether its process is no more; None where that cannot be seen from here."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's, of which /proc may show nothing
            return None
        return _started(self.pid) != self.started


def this_process() -> Holder:
    """The holder that this process would be."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return Holder(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()) or "", now)


@contextmanager
def held(
    folder: Path,
    *,
    lost: Callable[[str], None],
    say: Callable[[str], None] = lambda line: None,
    beat_s: float = _BEAT_S,
    stale_s: float = _STALE_S,
) -> Iterator[None]:
    """Hold the lock of an output folder, which is there, within the context.

    Args:
        lost: called from a thread, once, when another run has taken the lock: nothing may be written any more.
        say: told of a stale lock that was taken over, and of a wait for `stale_s`.

    Raises:
        ConfigError: another run holds it, or the folder cannot be written.
    """
    file, mine = folder / NAME, this_process()
    try:
        _take(file, mine, say=say, stale_s=stale_s)
    except OSError as error:
        raise ConfigError(f"ckpt.output_dir {folder} cannot be written: {error.strerror}") from error
    is_over = threading.Event()
    beat = threading.Thread(target=_keep, args=(file, mine, is_over, lost, beat_s), name="vlmrl-lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        is_over.set()
        beat.join(beat_s)
        holder = _read(file)
        if holder is not None and holder.nonce == mine.nonce:
            with suppress(OSError):  # a disk that has turned read-only: the next run sees that this process is no more
                file.unlink(missing_ok=True)


def refuse_if_live(folder: Path) -> None:
    """Raise ConfigError where a run of this machine holds the folder; writes nothing and waits for nothing."""
    holder = _read(folder / NAME)
    if holder is not None and holder.is_gone is False:
        raise _in_use(folder, holder)


def _take(file: Path, mine: Holder, *, say: Callable[[str], None], stale_s: float) -> None:
    while not _create(file, mine):
        holder = _read(file)
        is_gone = None if holder is None else holder.is_gone
        if is_gone is None:
            say(f"{file} is the lock of {holder or 'a run that is starting'}: waiting {stale_s:g} s for a sign of life")
            is_gone = not _lives(file, stale_s)
        if not is_gone:
            raise _in_use(file.parent, holder)
        if _remove(file, holder):
            say(f"{file} was left by {holder or 'a run that was killed'}: that run is no more")


def _in_use(folder: Path, holder: Holder | None) -> ConfigError:
    return ConfigError(
        f"ckpt.output_dir {folder} is in use by {holder or 'another run'}: wait for that run, stop it, or choose "
        "another --ckpt.output_dir"
    )


def _create(file: Path, mine: Holder) -> bool:
    """Write the lock, whole at once. False when there is one already."""
    written = file.with_name(f"{NAME}.{mine.nonce}")
    written.write_text(json.dumps(asdict(mine)), encoding="utf-8")
    try:
        os.link(written, file)
    except FileExistsError:
        return written.stat().st_nlink > 1  # the answer of a server to a request that it had granted and that was lost
    except OSError:  # a file system without hard links
        return _create_in_place(file, mine)
    finally:
        written.unlink(missing_ok=True)
    return True


def _create_in_place(file: Path, mine: Holder) -> bool:
    try:
        with file.open("x", encoding="utf-8") as lock:
            lock.write(json.dumps(asdict(mine)))
    except FileExistsError:
        return False
    return True


def _remove(file: Path, stale: Holder | None) -> bool:
    """Remove a stale lock. False when another run was faster: what it wrote stays."""
    aside = file.with_name(f"{NAME}.{uuid.uuid4().hex}")
    try:
        file.rename(aside)
    except FileNotFoundError:
        return False
    is_stale = _read(aside) == stale
    if not is_stale:
        with suppress(OSError):  # a third run holds it by now; the second notices and ends
            os.link(aside, file)
    aside.unlink()
    return is_stale


def _lives(file: Path, limit_s: float) -> bool:
    """Whether somebody touches or removes the lock within the limit."""
    end, first = time.monotonic() + limit_s, _touched(file)
    while time.monotonic() < end:
        time.sleep(min(0.5, limit_s / 10))
        if _touched(file) != first:
            return file.exists()
    return False


def _touched(file: Path) -> int | None:
    try:
        # Opening makes NFS ask the server, where a plain stat may be answered from a cache.
        with file.open("rb") as lock:
            return os.fstat(lock.fileno()).st_mtime_ns
    except PermissionError:  # another user's, who lets nobody read it
        with suppress(OSError):
            return file.stat().st_mtime_ns
    except OSError:
        pass
    return None


def _keep(file: Path, mine: Holder, is_over: threading.Event, lost: Callable[[str], None], beat_s: float) -> None:
    while not is_over.wait(beat_s):
        holder = _read(file)
        if holder is not None and holder.nonce != mine.nonce:
            lost(f"{file} was taken over by {holder}: this run ends and writes nothing any more")
            return
        with suppress(OSError):  # a full disk, or a server that is away: whoever writes says so
            if holder is None and file.parent.is_dir() and not file.exists():
                _create(file, mine)
            else:
                os.utime(file)


def _read(file: Path) -> Holder | None:
    """The holder that a lock names; None where there is none, or where it cannot be read."""
    try:
        return Holder(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process started, in ticks since boot; None when there is no such process, or a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
