"""End a child process when its parent dies, however it dies.

vLLM's engine core is a separate process. When its parent is killed (SIGKILL: no handler, no atexit), vLLM leaves the
core running, with its memory. Linux's PR_SET_PDEATHSIG does not help: it fires at the end of the *thread* that started
the child, and engines are started from a thread, so that the start can have a time limit.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from vlmrl.system import stops

_INTERVAL_S = 0.2
_PR_SET_PDEATHSIG = 1

_armed = False


class Lifeline:
    """Arms the child process that unpickles it, as one of the arguments of the process.

    That happens before the child calls any of its functions, so that a vLLM engine has loaded nothing yet.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (os.getpid(),)

    def compute_hash(self) -> str:
        """vLLM requires it of all members of its configuration."""
        return "lifeline"


def _unpickle(parent: int) -> Lifeline:
    arm(parent)
    return Lifeline()


def arm(parent: int) -> None:
    """Make this process die when its parent does. Idempotent.

    Does nothing in `parent` itself. A process that another one started only accepts SIGTERM: a fork of the fork server
    ends with its client, which is the child of `parent`.
    """
    global _armed
    if _armed or parent == os.getpid():
        return
    if os.getppid() == parent:
        _armed = True
        stops.accept_sigterm()
        threading.Thread(target=_watch, args=(parent,), name="vlmrl-lifeline", daemon=True).start()
    elif not _is_running(parent):
        _die()
    else:
        stops.accept_sigterm()


def die_with(parent: int) -> None:
    """Have the kernel kill this process with `parent`, whose main thread has forked it. Does nothing without Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died meanwhile
            _die()


def end_group_with(owner: int) -> None:
    """Put this process into a group of its own, and have the group killed when this process or `owner` ends, however it
    ends.

    Programs that this process starts are in the group, unless they leave it (`start_new_session`). The process that
    waits and kills is no child of this one, whose code may wait for all of its children.
    """
    os.setpgrp()
    leader = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setpgrp()
        pidfds = os.pidfd_open(leader), os.pidfd_open(owner)
        if os.fork() == 0:
            _kill_group(leader, pidfds)
    except ProcessLookupError:  # the owner has ended meanwhile
        os.killpg(leader, signal.SIGKILL)
    finally:  # also where the kernel has no pidfd, or no process left
        os._exit(0)


def _kill_group(leader: int, pidfds: tuple[int, ...]) -> None:
    """Wait for the end of one of the processes, and kill the leader's group."""
    # Whoever reads from a pipe of the leader sees its end only once nobody else holds the other end.
    for before, after in pairwise((-1, *sorted(pidfds), os.sysconf("SC_OPEN_MAX"))):
        os.closerange(before + 1, after)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    select.select(pidfds, [], [])
    os.killpg(leader, signal.SIGKILL)


def _watch(parent: int) -> None:
    # Another process adopts an orphan immediately, even while its dead parent is a zombie.
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
