"""Lock an output folder for the length of a run, also on shared file systems.

The lock file names host, process and start time. On the holder's machine a lock is stale when that process has ended.
From another machine or container the process is not visible: there a lock is stale when its holder has not touched it
for a while, measured only by the waiting process. Clocks of different machines are never compared.
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
_HEARTBEAT_S = 5.0
"""Interval at which the holder touches its lock."""
_STALE_S = 30.0
"""A lock of another machine is stale when untouched for so long: six heartbeats, since a file server may be slow."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock."""

    host: str
    machine: str
    """Boot id and PID namespace: where these are equal, a process id names the same process."""
    pid: int
    started: str
    """Start time of the process, which distinguishes it from a later one with the same id."""
    since: str
    """Time at which it took the lock, by its own clock."""
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if that cannot be seen from here."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's process, which /proc may hide
            return None
        return _started(self.pid) != self.started


def this_process() -> Holder:
    """Return the holder that names this process."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return Holder(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()) or "", now)


@contextmanager
def run_lock(
    folder: Path,
    *,
    on_lost: Callable[[str], None],
    notify: Callable[[str], None] = lambda line: None,
    heartbeat_s: float = _HEARTBEAT_S,
    stale_s: float = _STALE_S,
) -> Iterator[None]:
    """Hold the lock of an existing output folder within the context.

    Args:
        on_lost: called once, from a thread, when another run has taken the lock: nothing may be written after that.
        notify: called with a line about a stale lock that was taken over, or a wait of `stale_s` seconds.

    Raises:
        ConfigError: another run holds it, or the folder cannot be written.
    """
    file, mine = folder / NAME, this_process()
    try:
        _take(file, mine, notify=notify, stale_s=stale_s)
    except OSError as error:
        raise ConfigError(f"ckpt.output_dir {folder} cannot be written: {error.strerror}") from error
    is_over = threading.Event()
    arguments = (file, mine, is_over, on_lost, heartbeat_s)
    heartbeat = threading.Thread(target=_keep_alive, args=arguments, name="vlmrl-lock", daemon=True)
    heartbeat.start()
    try:
        yield
    finally:
        is_over.set()
        heartbeat.join(heartbeat_s)
        holder = _read(file)
        if holder is not None and holder.nonce == mine.nonce:
            with suppress(OSError):  # a disk that became read-only; the next run sees that this process has ended
                file.unlink(missing_ok=True)


def refuse_if_locked(folder: Path) -> None:
    """Raise ConfigError if a run on this machine holds the folder. Does not write or wait."""
    holder = _read(folder / NAME)
    if holder is not None and holder.is_gone is False:
        raise _in_use(folder, holder)


def is_held(folder: Path) -> bool:
    """Whether a run holds the folder, as far as one look can tell: of a run on another machine, by the last touch."""
    holder = _read(folder / NAME)
    if holder is None or holder.is_gone is not None:
        return holder is not None and not holder.is_gone
    with suppress(OSError):  # the run ended meanwhile
        return time.time() - (folder / NAME).stat().st_mtime < _STALE_S
    return False


def _take(file: Path, mine: Holder, *, notify: Callable[[str], None], stale_s: float) -> None:
    while not _create(file, mine):
        holder = _read(file)
        is_gone = None if holder is None else holder.is_gone
        if is_gone is None:
            notify(
                f"{file} is the lock of {holder or 'a run that is starting'}: waiting {stale_s:g} s to see "
                "whether it is still held"
            )
            is_gone = not _is_touched(file, stale_s)
        if not is_gone:
            raise _in_use(file.parent, holder)
        if _remove(file, holder):
            notify(f"{file} was left by {holder or 'a run that was killed'}: that run has ended; its lock is removed")


def _in_use(folder: Path, holder: Holder | None) -> ConfigError:
    return ConfigError(
        f"ckpt.output_dir {folder} is in use by {holder or 'another run'}: wait for that run, stop it, or choose "
        "another --ckpt.output_dir"
    )


def _create(file: Path, mine: Holder) -> bool:
    """Write the lock atomically. False when there is one already."""
    written = file.with_name(f"{NAME}.{mine.nonce}")
    written.write_text(json.dumps(asdict(mine)), encoding="utf-8")
    try:
        os.link(written, file)
    except FileExistsError:
        return written.stat().st_nlink > 1  # NFS may report this for its own retry of a link that succeeded
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
    """Remove a stale lock. False when another run has replaced it already, whose lock is kept."""
    aside = file.with_name(f"{NAME}.{uuid.uuid4().hex}")
    try:
        file.rename(aside)
    except FileNotFoundError:
        return False
    is_stale = _read(aside) == stale
    if not is_stale:
        with suppress(OSError):  # a third run holds it by now; the second one notices and ends
            os.link(aside, file)
    aside.unlink()
    return is_stale


def _is_touched(file: Path, limit_s: float) -> bool:
    """Whether the holder touches the lock within the limit."""
    end, first = time.monotonic() + limit_s, _modified_ns(file)
    while time.monotonic() < end:
        time.sleep(min(0.5, limit_s / 10))
        if _modified_ns(file) != first:
            return file.exists()
    return False


def _modified_ns(file: Path) -> int | None:
    try:
        # Opening makes NFS query the server; a plain stat may be served from a cache.
        with file.open("rb") as lock:
            return os.fstat(lock.fileno()).st_mtime_ns
    except PermissionError:  # another user's file, readable by its owner only
        with suppress(OSError):
            return file.stat().st_mtime_ns
    except OSError:
        pass
    return None


def _keep_alive(
    file: Path, mine: Holder, is_over: threading.Event, on_lost: Callable[[str], None], heartbeat_s: float
) -> None:
    while not is_over.wait(heartbeat_s):
        holder = _read(file)
        if holder is not None and holder.nonce != mine.nonce:
            on_lost(f"{file} was taken over by {holder}: this run ends without writing anything more")
            return
        with suppress(OSError):  # a full disk or an unreachable server is reported where the run writes
            if holder is None and file.parent.is_dir() and not file.exists():
                _create(file, mine)
            else:
                os.utime(file)


def _read(file: Path) -> Holder | None:
    """Return the holder that a lock names; None if there is no lock or it cannot be read."""
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
    """Return the start time of a process in ticks since boot; None if there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
