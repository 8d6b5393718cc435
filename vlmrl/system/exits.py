"""End this process; find out how another ended: exit code or signal, and whether the kernel killed it for lack of
memory."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
"""_IOWR(0xFF, 11, struct pidfd_info) of <linux/pidfd.h>, for the 64 bytes of its first version."""
_PIDFD_INFO_EXIT = 1 << 3
_POLL_S = 0.05
_ABANDONED_S = 5.0
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FATAL_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
}
"""Name in the messages of faulthandler -> signal."""
_LAST_BYTES = 64 * 1024
_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Counters of the container if it has one, else of the machine."""


class Pidfd:
    """Reads the exit code of a process that is not a child of this one, which Linux 6.15 and later allow."""

    def __init__(self, pid: int) -> None:
        self._descriptor = -1
        with suppress(OSError):  # it has ended already, or the kernel is older than pidfds
            self._descriptor = os.pidfd_open(pid)

    def returncode(self, patience_s: float = 1.0) -> int | None:
        """Return the exit code, or minus the signal that ended it; None if the kernel does not report it in
        `patience_s`."""
        deadline = time.monotonic() + patience_s
        while self._descriptor >= 0:
            info = bytearray(64)
            struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
            try:
                fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, info)
            except OSError:  # an older kernel
                return None
            if struct.unpack_from("Q", info, 0)[0] & _PIDFD_INFO_EXIT:
                return os.waitstatus_to_exitcode(struct.unpack_from("i", info, 60)[0])
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def fatal_signal(log: Path) -> int | None:
    """Minus the fatal signal that Python's fault handler reported last in `log`; None if there is none."""
    names = _FATAL.findall(log_tail(log))
    number = _FATAL_SIGNALS.get(names[-1]) if names else None
    return None if number is None else -number


def log_tail(log: Path) -> str:
    """Return the end of a log file; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def oom_kills() -> int:
    """Return the number of out-of-memory kills since the kernel, or the container, started."""
    for counter in _COUNTERS:
        with suppress(OSError):
            match = re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)
            if match is not None:
                return int(match.group(1))
    return 0


def format_exit(returncode: int | None, *, is_out_of_memory: bool) -> str:
    """Format like `was killed by signal 9 (SIGKILL)` or `ended with exit code 3`; None is an unknown code."""
    if is_out_of_memory:
        return "was killed by the kernel: out of memory"
    if returncode is None:
        return "ended without a message, as a killed process does"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = "no name"
    return f"was killed by signal {-returncode} ({name})"


def may_be_out_of_memory(returncode: int | None) -> bool:
    """Whether the process may have been killed for lack of memory, by the kernel or a container's limit."""
    return returncode in (None, -signal.SIGKILL, -signal.SIGBUS)


_abandoned: set[str] = set()


def abandon(what: str) -> None:
    """Let the end of this process not wait for threads: those of `what` do not end, as their service does not answer.

    An interpreter waits for the threads of executors without limit.
    """
    _abandoned.add(what)


def end_process(code: Any) -> NoReturn:
    """End this process with the code or the message of a SystemExit, without unloading its modules.

    All else that the interpreter does at its end is done, within a limit where something was abandoned. Unloading
    PyTorch and Ray takes about a second.
    """
    if _abandoned:
        last = threading.Thread(target=_quietly, args=(atexit._run_exitfuncs,), daemon=True)
        last.start()
        last.join(_ABANDONED_S)
    else:
        _quietly(threading._shutdown)  # type: ignore[attr-defined]
        _quietly(atexit._run_exitfuncs)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _quietly(stream.flush)
    if code is not None and not isinstance(code, int):
        with suppress(Exception):
            sys.stderr.write(f"{code}\n")
        code = 1
    os._exit((code or 0) & 0xFF)


def _quietly(function: Callable[[], Any]) -> None:
    with suppress(Exception):
        function()
