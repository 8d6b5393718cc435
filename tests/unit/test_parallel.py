from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from vlmrl.parallel import run_parallel, settle


def test_calls_run_in_parallel_and_return_in_order() -> None:
    both = threading.Barrier(2, timeout=10)
    assert run_parallel(lambda: (both.wait(), "a")[1], lambda: (both.wait(), "b")[1]) == ["a", "b"]
    assert run_parallel() == []


def test_the_first_error_is_raised_while_others_wait() -> None:
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("at once")

    try:
        with pytest.raises(ValueError, match="at once"):
            run_parallel(lambda: ended.wait(30), fail)
        assert not ended.is_set()
    finally:
        ended.set()


def test_abandoned_calls_are_waited_for_up_to_their_limit() -> None:
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        run_parallel(lambda: ended.wait(30), fail)
    assert not settle(0.05)
    ended.set()
    assert settle(10)


def test_a_call_that_never_returns_does_not_keep_the_program_from_ending() -> None:
    code = """
import threading
from vlmrl.parallel import run_parallel
def fail(): raise ValueError("at once")
run_parallel(threading.Event().wait, fail)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: at once\n")
