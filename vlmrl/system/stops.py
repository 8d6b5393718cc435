"""End a run in order on SIGTERM, SIGHUP and Ctrl-C, and save a checkpoint on SIGUSR1.

The first request to stop interrupts waits, lets steps that have begun finish (`uninterrupted`), and allows `grace_s`
seconds for that. A second request, or the end of that time, kills this process and its descendants immediately.

Signals belong to the process, and so does the state of this module. Outside of `handle_signals` all of it does nothing.
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

from vlmrl.errors import ClusterError, VlmrlError

_EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 143}
SIGNALS = (*_EXIT_CODES, signal.SIGUSR1)
"""All signals that a run handles."""
_ECHO_S = 1.0
"""`timeout`, `uv run` and other parents send a signal twice, to the process and to its group: it counts once."""
_TRACKERS_S = 5.0
"""Time for Python's resource trackers to end by themselves: they remove what others left in shared memory."""


class Stopped(KeyboardInterrupt):
    """The run was asked to stop. A KeyboardInterrupt, the only exception that passes through Ray's waits.

    Args:
        number: the signal.
        line: the state of the run, for users.
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
    """The signals that this process received, and which parts of its work they may interrupt."""

    grace_s: float
    number: int | None = None
    """The signal to stop."""
    received_at: float = 0.0
    is_raised: bool = False
    is_done: bool = False
    """The work of the process is done."""
    wants_checkpoint: bool = False
    only_in_waits: bool = False
    """Only waits are interrupted: between two of them, calls to the ranks of a role belong together."""
    num_waits: int = 0
    num_uninterrupted: int = 0
    timer: threading.Timer | None = field(default=None)


_requests: _Requests | None = None
_before_kill: list[Callable[[], None]] = []


@contextmanager
def handle_signals(grace_s: float) -> Iterator[None]:
    """Handle the signals within the context. In threads other than the main one this does nothing.

    Raises:
        Stopped: at the first request, as soon as it may be raised.
    """
    global _requests
    if threading.current_thread() is not threading.main_thread() or _requests is not None:
        yield
        return
    requests = _requests = _Requests(grace_s)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        install_handlers()
        yield
    except KeyboardInterrupt as error:  # Ray replaces ours by its own
        if requests.number is None:
            raise
        stop = error if isinstance(error, Stopped) else Stopped(requests.number)
        cause = _ended_by(error)
        if cause is not None:  # the run was ending already, and the request must not hide the reason
            stop = Stopped(stop.number, f"{stop.line}; the run was ending: {cause}")
        raise stop from None
    except ClusterError as error:
        # The signal may also have ended roles, for example on other machines, in the middle of a step.
        if requests.number is None:
            raise
        raise Stopped(requests.number, f"the current step was not finished: {error}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if requests.timer is not None:
            requests.timer.cancel()
        _requests = None


def install_handlers() -> None:
    """Install the handlers, again after Ray has started, which installs its own for SIGTERM.

    Signals that are ignored, by nohup or for a shell's background jobs, stay ignored.
    """
    if _main_thread_requests() is None:
        return
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _save if number == signal.SIGUSR1 else _stop)


@contextmanager
def interruptible_wait() -> Iterator[None]:
    """Let requests interrupt the wait for other processes within the context, except inside `uninterrupted`.

    Raises:
        Stopped: at the request, or at the beginning if it came before.
    """
    requests = _main_thread_requests()
    if requests is None:
        yield
        return
    # Since the last wait Ray may have replaced our handler by its own, which aborts with a dump.
    install_handlers()
    requests.num_waits += 1
    try:
        _raise_if(requests)
        yield
    except KeyboardInterrupt as error:
        if requests.number is None or isinstance(error, Stopped):
            raise
        raise Stopped(requests.number) from None
    finally:
        requests.num_waits -= 1


@contextmanager
def only_in_waits() -> Iterator[None]:
    """Let requests interrupt only waits within the context."""
    requests = _main_thread_requests()
    if requests is None:
        yield
        return
    before, requests.only_in_waits = requests.only_in_waits, True
    try:
        yield
    finally:
        requests.only_in_waits = before


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold requests back within the context; call `raise_if_requested` after it.

    Raises:
        Stopped: at the beginning, if a request came before.
    """
    requests = _main_thread_requests()
    if requests is None:
        yield
        return
    _raise_if(requests)
    requests.num_uninterrupted += 1
    try:
        yield
    finally:
        requests.num_uninterrupted -= 1


@contextmanager
def interruptible() -> Iterator[None]:
    """Allow interruption within the context though it is inside `uninterrupted`.

    Raises Stopped as `interruptible_wait` does.
    """
    requests = _main_thread_requests()
    if requests is None:
        yield
        return
    before, requests.num_uninterrupted = requests.num_uninterrupted, 0
    try:
        yield
    finally:
        requests.num_uninterrupted = before


def raise_if_requested() -> None:
    """Raise Stopped if a request has come, even if it was raised before."""
    requests = _main_thread_requests()
    if requests is not None and requests.number is not None:
        requests.is_raised = True
        raise Stopped(requests.number)


def mark_done() -> None:
    """Record that all results are saved: from now on a request interrupts nothing and does not change the exit code.

    The rest of the shutdown still has to end within the grace period, and a second request still kills the process.
    """
    if _requests is not None:
        _requests.is_done = True


def is_stopping() -> bool:
    """Whether this process was asked to stop."""
    return _requests is not None and _requests.number is not None


def take_checkpoint_request() -> bool:
    """Whether SIGUSR1 has come since the last call."""
    if _requests is None or not _requests.wants_checkpoint:
        return False
    _requests.wants_checkpoint = False
    return True


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals that end a run in all processes that are started within the context, and in their descendants.

    `timeout`, SLURM and systemd send them to every process of a run, but Ray and the ranks have to live until the
    current step is finished. A process that has to end by SIGTERM calls `accept_sigterm`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Keep SIGTERM and SIGINT away from this process and its descendants where `signals_blocked` is not enough.

    Python unblocks both when it starts its resource tracker. In their own process group, descendants do not get
    signals that are sent to the driver's group: an engine core, for example, has to end by SIGTERM, but not before it
    has received the weights of the last update.
    """
    with suppress(OSError):  # it leads a session
        os.setpgrp()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def block_signals() -> None:
    """Block the signals in this thread permanently: Python unblocks them when it starts its resource tracker."""
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def accept_sigterm() -> None:
    """Unblock SIGTERM after `signals_blocked`, in a process whose parent ends it by SIGTERM."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextmanager
def before_kill(action: Callable[[], None]) -> Iterator[None]:
    """Let `kill_and_exit` call `action` first within the context. It runs in any thread and must not wait."""
    _before_kill.append(action)
    try:
        yield
    finally:
        _before_kill.remove(action)


def kill_and_exit(line: str, code: int) -> None:
    """Print a line, kill all descendants, and exit without cleaning up."""
    for action in list(_before_kill):
        action()
    with suppress(OSError, ValueError, AttributeError):
        # Not descriptor 2, which may be redirected to the run's log.
        os.write(sys.stderr.fileno(), f"vlmrl: {line}\n".encode())
    kill_processes(psutil.Process().children(recursive=True))
    os._exit(code)


def kill_processes(family: list[psutil.Process]) -> None:
    """Kill these processes, except Python's resource trackers, which get time to end by themselves."""
    trackers = [member for member in family if _tracks_resources(member)]
    _kill([member for member in family if member not in trackers])
    end = time.monotonic() + _TRACKERS_S
    while any(map(_is_running, trackers)) and time.monotonic() < end:
        time.sleep(0.02)
    _kill(trackers)


def _kill(family: list[psutil.Process]) -> None:
    for member in family:
        with suppress(psutil.Error):  # it has already ended
            member.kill()
    end = time.monotonic() + _TRACKERS_S
    while any(map(_is_running, family)) and time.monotonic() < end:
        time.sleep(0.02)


def _is_running(process: psutil.Process) -> bool:
    """Whether a process runs. Zombies do not count: the first process of a container may never reap them."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _tracks_resources(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:  # it has already ended
        return False


def _ended_by(error: BaseException) -> VlmrlError | None:
    """Return the VlmrlError that was being handled when this error came; None if there was none."""
    context = error.__context__
    while context is not None and not isinstance(context, VlmrlError):
        context = context.__context__
    return context


def _main_thread_requests() -> _Requests | None:
    """Return the requests in the main thread, which they interrupt; None in others."""
    return _requests if threading.current_thread() is threading.main_thread() else None


def _raise_if(requests: _Requests) -> None:
    if requests.is_done or requests.num_uninterrupted:
        return
    if requests.number is not None and not requests.is_raised:
        requests.is_raised = True
        raise Stopped(requests.number)


def _stop(number: int, frame: FrameType | None) -> None:
    requests = _requests
    if requests is None:
        return
    code, name = _EXIT_CODES[signal.Signals(number)], signal.Signals(number).name
    if requests.number is not None:
        if time.monotonic() - requests.received_at > _ECHO_S:
            kill_and_exit(f"ended immediately: {name} came after {signal.Signals(requests.number).name}", code)
        return
    requests.number, requests.received_at = number, time.monotonic()
    too_late = f"ended immediately: stopping took longer than train.stop_grace_s {requests.grace_s:g}"
    requests.timer = _start_timer(requests.grace_s, lambda: kill_and_exit(too_late, code))
    if requests.num_waits or not requests.only_in_waits:
        _raise_if(requests)


def _save(number: int, frame: FrameType | None) -> None:
    if _requests is not None:
        _requests.wants_checkpoint = True


def _start_timer(seconds: float, callback: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, callback)
    timer.daemon = True
    timer.start()
    return timer
