"""How a process ended: by which exit code or signal, and whether the kernel ended it because memory was used up."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
"""_IOWR(0xFF, 11, struct pidfd_info) of <linux/pidfd.h>, for the 64 bytes of its first version."""
_PIDFD_INFO_EXIT = 1 << 3
_ASK_AGAIN_S = 0.05
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FATAL_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
}
"""What faulthandler writes of a signal -> the signal."""
_LAST_BYTES = 64 * 1024
_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Of the container where it has one, else of the machine."""


class Pidfd:
    """A process of this machine that is not a child of this one: Linux 6.15 and later keep its exit code for us."""

    def __init__(self, pid: int) -> None:
        self._descriptor = -1
        with suppress(OSError):  # it has ended already, or the kernel is older than pidfds
            self._descriptor = os.pidfd_open(pid)

    def returncode(self, patience_s: float = 1.0) -> int | None:
        """Its exit code, or minus the signal that ended it; None where the kernel does not tell within `patience_s`."""
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
            time.sleep(_ASK_AGAIN_S)
        return None

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def fatal_signal(log: Path) -> int | None:
    """Minus the signal of which Python's fault handler wrote into `log` before its process died of it, if any."""
    found = _FATAL.findall(last_words(log))
    known = _FATAL_SIGNALS.get(found[-1]) if found else None
    return None if known is None else -known


def last_words(log: Path) -> str:
    """The end of a log file; nothing when it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def oom_kills() -> int:
    """How many processes the kernel has killed since it started, or since the container did, because memory was used
    up."""
    for counter in _COUNTERS:
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)
            if found is not None:
                return int(found.group(1))
    return 0


def described(returncode: int | None, *, is_out_of_memory: bool) -> str:
    """`was killed by signal 9 (SIGKILL)`, `ended with exit code 3`; None: nobody knows."""
    if is_out_of_memory:
        return "was killed by the kernel: out of memory"
    if returncode is None:
        return "ended without a word, as a killed process does"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = "no name"
    return f"was killed by signal {-returncode} ({name})"


def may_be_memory(returncode: int | None) -> bool:
    """Whether it may have been killed because memory was used up, by the kernel or by whatever limits a container."""
    return returncode in (None, -signal.SIGKILL, -signal.SIGBUS)
