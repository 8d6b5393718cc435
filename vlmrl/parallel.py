"""Runs calls that wait for other processes side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from vlmrl.system import stops

_running: set[threading.Thread] = set()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, in order.

    Raises the first error as soon as it is there, and leaves the other calls to whoever ends what they wait for. None
    of them keeps the program from ending.
    """
    futures = [_begin(call) for call in calls]
    with stops.waiting():
        ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in ended:
        future.result()
    return [future.result() for future in futures]


def settle(limit_s: float) -> bool:
    """Wait until no call is left of those that `together` gave up; False where some still run after `limit_s`."""
    end = time.monotonic() + limit_s
    for thread in list(_running):
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in list(_running))


def _begin(call: Callable[[], Any]) -> Future[Any]:
    """Make the call in a thread of its own. Those of an executor are waited for when the program ends."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # it belongs to whoever waits
            result.set_exception(error)
        finally:
            _running.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="vlmrl-together", daemon=True)
    _running.add(thread)
    thread.start()
    return result
