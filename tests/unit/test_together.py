from __future__ import annotations

import threading

import pytest

from vlmrl.together import together


def test_calls_run_side_by_side_and_answer_in_order() -> None:
    both = threading.Barrier(2, timeout=10)
    assert together(lambda: (both.wait(), "a")[1], lambda: (both.wait(), "b")[1]) == ["a", "b"]
    assert together() == []


def test_the_first_error_is_told_while_others_still_wait() -> None:
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("at once")

    try:
        with pytest.raises(ValueError, match="at once"):
            together(lambda: ended.wait(30), fail)
        assert not ended.is_set()
    finally:
        ended.set()
