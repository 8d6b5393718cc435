from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from vlmrl.parallel import run_parallel, settle


def test_calls_run_side_by_side_and_answer_in_order() -> None:
    both = threading.Barrier(2, timeout=10)
    assert run_parallel(lambda: (both.wait(), "a")[1], lambda: (both.wait(), "b")[1]) == ["a", "b"]
    assert run_parallel() == []


def test_the_first_error_is_told_while_others_still_wait() -> None:
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("at once")

    try:
        with pytest.raises(ValueError, match="at once"):
            run_parallel(lambda: ended.wait(30), fail)
        assert not ended.is_set()
    finally:
        ended.set()


def test_calls_that_were_given_up_are_waited_for_as_long_as_they_may_take() -> None:
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
