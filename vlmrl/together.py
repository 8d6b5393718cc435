"""Runs calls that wait for other processes side by side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, in order.

    Raises the first error as soon as it is there, and leaves the other calls to whoever ends what they wait for.
    """
    pool = ThreadPoolExecutor(max(1, len(calls)))
    try:
        futures = [pool.submit(call) for call in calls]
        ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in ended:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]
