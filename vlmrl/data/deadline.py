"""Calls of Python code that somebody else wrote, which end in time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.2
"""For a thread to notice that it was stopped."""


class OverdueError(Exception):
    """A call was not done within its limit."""


class _StopThread(BaseException):
    """Raised inside of a thread whose time is up. Not an Exception, which the code may catch."""


def call_within(limit_s: float, function: Callable[[], T]) -> T:
    """What `function()` returns or raises; it runs in a thread of its own, which is stopped at the limit.

    Loops of Python end so. One long operation of C (`10 ** 10 ** 10`) holds the interpreter, and nothing ends it.

    Raises:
        OverdueError: it was not done after `limit_s` seconds.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # it is raised again where the result is wanted
            errors.append(error)

    # A daemon: should it survive, the process ends all the same.
    thread = threading.Thread(target=run, name="vlmrl-limited", daemon=True)
    thread.start()
    thread.join(limit_s)
    if results:
        return results[0]
    if errors:
        raise errors[0]
    # The interpreter raises it between two operations of the thread.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_StopThread))
    thread.join(_PATIENCE_S)
    raise OverdueError(f"not done within {limit_s:g} s")
