"""Ends a run in order when the system or the user asks: SIGTERM, SIGHUP and Ctrl-C stop it, SIGUSR1 saves a checkpoint.

The first request interrupts whatever can be abandoned, lets what has begun be finished (`finishing`), and allows
`grace_s` seconds for all that. The second one, or the end of the grace, ends this process and all below it at once.

Signals are a process's own, and so is the state of this module. Outside of `heeded` everything here does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from types import FrameType

import psutil

from vlmrl.errors import ClusterError

_EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 143}
SIGNALS = (*_EXIT_CODES, signal.SIGUSR1)
"""Every signal that a run heeds."""
_ECHO_S = 1.0
"""`timeout`, `uv run` and other parents send a signal twice, to the process and to its group: that is one request."""
_TRACKERS_S = 5.0
"""For Python's resource trackers, which end last and by themselves: they remove what others left in shared memory."""


class Stopped(KeyboardInterrupt):
    """The run was asked to stop. A KeyboardInterrupt, which is all that Ray lets through while it waits.

    Args:
        number: the signal.
        line: what became of the run, for people.
    """

    def __init__(self, number: int, line: str = "nothing was saved") -> None:
        super().__init__(number, line)
        self.number, self.line = signal.Signals(number), line

    def __str__(self) -> str:
        return f"stopped by {self.number.name}: {self.line}"

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self.number]


@dataclass(slots=True)
class _Requests:
    """What was asked of this process, and what it is doing."""

    grace_s: float
    line: str = "nothing was saved"
    """What a stop of now leaves, for people."""
    number: int | None = None
    """The signal that asked to stop."""
    asked_at: float = 0.0
    is_raised: bool = False
    wants_checkpoint: bool = False
    only_in_waits: bool = False
    """Nothing but waits is interrupted: between two of them, calls to the ranks of a role belong together."""
    num_waits: int = 0
    num_finishing: int = 0
    timer: threading.Timer | None = field(default=None)


_requests: _Requests | None = None


@contextmanager
def heeded(grace_s: float) -> Iterator[None]:
    """Heed the signals within the context. Only the main thread can; in others nothing happens.

    Raises:
        Stopped: at the first request, as soon as it may be.
    """
    global _requests
    if threading.current_thread() is not threading.main_thread() or _requests is not None:
        yield
        return
    requests = _requests = _Requests(grace_s)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        attend()
        yield
    except KeyboardInterrupt as error:  # Ray raises its own in place of ours
        if requests.number is None or isinstance(error, Stopped):
            raise
        raise Stopped(requests.number, requests.line) from None
    except ClusterError as error:
        # The signal may have ended roles, on other machines say, before what had begun was finished.
        if requests.number is None:
            raise
        raise Stopped(requests.number, f"what had begun was not finished: {error}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if requests.timer is not None:
            requests.timer.cancel()
        _requests = None


def attend() -> None:
    """Take the signals (again: Ray takes SIGTERM for itself when it starts).

    What nohup, or a shell for its background jobs, has made this process ignore stays ignored.
    """
    if _mine() is None:
        return
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _save if number == signal.SIGUSR1 else _stop)


@contextmanager
def waiting() -> Iterator[None]:
    """A wait for other processes, which a request interrupts unless something is being finished.

    Raises:
        Stopped: now, or at the beginning where the request came before.
    """
    requests = _mine()
    if requests is None:
        yield
        return
    # Ray may have put its own handler, which aborts with a dump, in the place of ours since the last wait.
    attend()
    requests.num_waits += 1
    try:
        _raise_if(requests)
        yield
    except KeyboardInterrupt as error:
        if requests.number is None or isinstance(error, Stopped):
            raise
        raise Stopped(requests.number, requests.line) from None
    finally:
        requests.num_waits -= 1


@contextmanager
def only_in_waits() -> Iterator[None]:
    """Within the context requests interrupt waits and nothing else."""
    requests = _mine()
    if requests is None:
        yield
        return
    before, requests.only_in_waits = requests.only_in_waits, True
    try:
        yield
    finally:
        requests.only_in_waits = before


@contextmanager
def finishing() -> Iterator[None]:
    """What has begun here is finished before a request is heeded: `check` comes after it.

    Raises:
        Stopped: at the beginning, where the request came before.
    """
    requests = _mine()
    if requests is None:
        yield
        return
    _raise_if(requests)
    requests.num_finishing += 1
    try:
        yield
    finally:
        requests.num_finishing -= 1


@contextmanager
def abandonable() -> Iterator[None]:
    """What is here may be abandoned though it is a part of what is finished. Raises Stopped like `waiting`."""
    requests = _mine()
    if requests is None:
        yield
        return
    before, requests.num_finishing = requests.num_finishing, 0
    try:
        yield
    finally:
        requests.num_finishing = before


def check() -> None:
    """Raise Stopped if that was asked, whether or not it was raised before."""
    requests = _mine()
    if requests is not None and requests.number is not None:
        requests.is_raised = True
        raise Stopped(requests.number, requests.line)


def told(line: str) -> None:
    """What `Stopped` says from now on of what became of the run."""
    requests = _mine()
    if requests is not None:
        requests.line = line


def is_stopping() -> bool:
    """Whether this process was asked to stop."""
    return _requests is not None and _requests.number is not None


def take_checkpoint_request() -> bool:
    """Whether SIGUSR1 came since the last call."""
    if _requests is None or not _requests.wants_checkpoint:
        return False
    _requests.wants_checkpoint = False
    return True


@contextmanager
def withheld() -> Iterator[None]:
    """Processes that are started within the context, and those below them, do not get the signals that end a run.

    `timeout`, SLURM and systemd send them to every process of a run: Ray and the ranks have to live on until what has
    begun is finished. A process that wants the signals back calls `accepted`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignored() -> None:
    """This process and those below it live on where `withheld` does not hold: Python lets SIGTERM and SIGINT through
    again when it starts its resource tracker.

    In a group of their own they do not get what is sent to the driver's: an engine core, say, which has to end by
    SIGTERM, and has to take the weights of an update that is finished.
    """
    with suppress(OSError):  # it leads a session
        os.setpgrp()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def withhold() -> None:
    """This thread does not get the signals any more, even where Python starts its resource tracker later."""
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def accepted() -> None:
    """This process ends by SIGTERM in spite of `withheld`: that is how the one that started it ends it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_at_once(line: str, code: int) -> None:
    """Say why, kill every process below this one, and end without any cleaning up."""
    with suppress(OSError, ValueError, AttributeError):
        # Descriptor 2 itself may be a run's log, which nobody watches.
        os.write(sys.stderr.fileno(), f"vlmrl: {line}\n".encode())
    end_family(psutil.Process().children(recursive=True))
    os._exit(code)


def end_family(family: list[psutil.Process]) -> None:
    """Kill these processes; Python's resource trackers among them end by themselves."""
    trackers = [member for member in family if _tracks_resources(member)]
    _kill([member for member in family if member not in trackers])
    end = time.monotonic() + _TRACKERS_S
    while any(map(_is_running, trackers)) and time.monotonic() < end:
        time.sleep(0.02)
    _kill(trackers)


def _kill(family: list[psutil.Process]) -> None:
    for member in family:
        with suppress(psutil.Error):  # it has ended by itself
            member.kill()
    end = time.monotonic() + _TRACKERS_S
    while any(map(_is_running, family)) and time.monotonic() < end:
        time.sleep(0.02)


def _is_running(process: psutil.Process) -> bool:
    """Not so of the dead whom nobody buries: the first process of a container may not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _tracks_resources(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:  # it has ended by itself
        return False


def _mine() -> _Requests | None:
    """The requests, for the thread that is interrupted by them."""
    return _requests if threading.current_thread() is threading.main_thread() else None


def _raise_if(requests: _Requests) -> None:
    if requests.number is not None and not requests.is_raised and not requests.num_finishing:
        requests.is_raised = True
        raise Stopped(requests.number, requests.line)


def _stop(number: int, frame: FrameType | None) -> None:
    requests = _requests
    if requests is None:
        return
    code, name = _EXIT_CODES[signal.Signals(number)], signal.Signals(number).name
    if requests.number is not None:
        if time.monotonic() - requests.asked_at > _ECHO_S:
            end_at_once(f"ended at once: {name} came after {signal.Signals(requests.number).name}", code)
        return
    requests.number, requests.asked_at = number, time.monotonic()
    too_late = f"ended at once: stopping took longer than train.stop_grace_s {requests.grace_s:g}"
    requests.timer = _timer(requests.grace_s, lambda: end_at_once(too_late, code))
    if requests.num_waits or not requests.only_in_waits:
        _raise_if(requests)


def _save(number: int, frame: FrameType | None) -> None:
    if _requests is not None:
        _requests.wants_checkpoint = True


def _timer(seconds: float, then: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, then)
    timer.daemon = True
    timer.start()
    return timer
