"""A child process that never outlives its parent, however the parent dies.

vLLM's engine core is a process of its own. When the process that started it is killed (SIGKILL: no handler, no
atexit), vLLM leaves the core running, with its memory. Linux's PR_SET_PDEATHSIG is not the cure: it fires at the end
of the *thread* that started the child, and engines are started from a thread, so that the start can have a time limit.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from vlmrl.system import stops

_INTERVAL_S = 0.2

_armed = False


class Lifeline:
    """Hand it to a child among the arguments of its process: a child is armed by unpickling it.

    That is before any function of the child's own is called, and for a vLLM engine before it has loaded anything.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (os.getpid(),)

    def compute_hash(self) -> str:
        """vLLM's configuration asks its members for one."""
        return "lifeline"


def _unpickle(parent: int) -> Lifeline:
    arm(parent)
    return Lifeline()


def arm(parent: int) -> None:
    """From now on this process dies when `parent`, the process that started it, does. Idempotent.

    Does nothing in `parent` itself, and in a process that some other process has started.
    """
    global _armed
    if _armed or parent == os.getpid():
        return
    if os.getppid() == parent:
        _armed = True
        stops.accepted()
        threading.Thread(target=_watch, args=(parent,), name="vlmrl-lifeline", daemon=True).start()
    elif not _is_running(parent):
        _die()


def _watch(parent: int) -> None:
    # An orphan is adopted at once by another process, even while its dead parent is still a zombie.
    while os.getppid() == parent:
        time.sleep(_INTERVAL_S)
    _die()


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
