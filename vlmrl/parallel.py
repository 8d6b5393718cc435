"""Run blocking calls in parallel threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from vlmrl.system import stops

_running: set[threading.Thread] = set()


def run_parallel(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls at the same time; return their results in order.

    Raises the first error immediately. The other calls go on until the processes that they wait for are ended; their
    threads are daemons and do not keep the program from ending.
    """
    futures = [_start(call) for call in calls]
    with stops.interruptible_wait():
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    return [future.result() for future in futures]


def settle(limit_s: float) -> bool:
    """Wait for the calls that `run_parallel` abandoned; False if some still run after `limit_s`."""
    end = time.monotonic() + limit_s
    for thread in list(_running):
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in list(_running))


def _start(call: Callable[[], Any]) -> Future[Any]:
    """Run the call in a daemon thread. Python waits for the threads of an executor before it exits."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # `run_parallel` raises it again
            result.set_exception(error)
        finally:
            _running.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="vlmrl-parallel", daemon=True)
    _running.add(thread)
    thread.start()
    return result
