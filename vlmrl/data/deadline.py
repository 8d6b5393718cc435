"""Call third-party Python code with a limit of CPU time."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_STOP_WAIT_S = 0.2
"""Seconds for a stopped thread to end."""
_MIN_WAIT_S = 0.01
_WAIT_FACTOR = 60
"""A call that waits, and does not compute, may take its limit so many times."""


class OverdueError(Exception):
    """The call did not return within its limit."""


class _StopThread(BaseException):
    """Raised inside a thread at its limit. Not an Exception, which the called code may catch."""


def call_within(limit_s: float, function: Callable[[], T]) -> T:
    """Run `function()` in a separate thread, which is stopped at the limit; return or raise what it does.

    The limit is on the time that the function computes: it is not overdue because the machine is busy. The stop ends
    Python loops, but not a single long operation in C (`10 ** 10 ** 10`), which holds the interpreter.

    Raises:
        OverdueError: the function did not return within `limit_s` seconds of CPU time.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    clocks: list[Callable[[], float]] = []

    def run() -> None:
        clocks.append(_clock())
        try:
            results.append(function())
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)

    # A daemon thread does not keep the process alive if it cannot be stopped.
    thread = threading.Thread(target=run, name="vlmrl-limited", daemon=True)
    thread.start()
    latest = time.monotonic() + _WAIT_FACTOR * limit_s
    left = limit_s
    while thread.is_alive() and left > 0 and time.monotonic() < latest:
        thread.join(max(left, _MIN_WAIT_S))
        with suppress(OSError):  # the thread has ended
            left = limit_s - sum(clock() for clock in clocks)  # it may not have begun
    if results:
        return results[0]
    if errors:
        raise errors[0]
    # The interpreter raises this between two bytecode instructions of the thread.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_StopThread))
    thread.join(_STOP_WAIT_S)
    raise OverdueError(f"not done within {limit_s:g} s")


def _clock() -> Callable[[], float]:
    """Return a clock of the CPU time of this thread, for other threads to read."""
    number = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(number)
