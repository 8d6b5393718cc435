"""Call third-party Python code with a time limit."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_STOP_WAIT_S = 0.2
"""Seconds for a stopped thread to end."""


class OverdueError(Exception):
    """The call did not return within its limit."""


class _StopThread(BaseException):
    """Raised inside a thread at its limit. Not an Exception, which the called code may catch."""


def call_within(limit_s: float, function: Callable[[], T]) -> T:
    """Run `function()` in a separate thread, which is stopped at the limit; return or raise what it does.

    This stops Python loops, but not a single long operation in C (`10 ** 10 ** 10`), which holds the interpreter.

    Raises:
        OverdueError: the function did not return within `limit_s` seconds.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)

    # A daemon thread does not keep the process alive if it cannot be stopped.
    thread = threading.Thread(target=run, name="vlmrl-limited", daemon=True)
    thread.start()
    thread.join(limit_s)
    if results:
        return results[0]
    if errors:
        raise errors[0]
    # The interpreter raises this between two bytecode instructions of the thread.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_StopThread))
    thread.join(_STOP_WAIT_S)
    raise OverdueError(f"not done within {limit_s:g} s")
