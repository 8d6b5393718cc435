import threading
import time

import pytest

from vlmrl.data.deadline import OverdueError, call_within


def test_a_call_returns_or_raises_what_the_function_does() -> None:
    assert call_within(5.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, lambda: 1 // 0)


def test_time_in_which_the_machine_is_busy_does_not_count() -> None:
    def wait() -> int:
        time.sleep(0.5)
        return 7

    assert call_within(0.1, wait) == 7


def test_a_call_that_waits_for_ever_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrl.data.deadline._WAIT_FACTOR", 3)
    forever = threading.Event()
    with pytest.raises(OverdueError):
        call_within(0.1, lambda: forever.wait(20))
    forever.set()


def test_an_endless_loop_is_stopped() -> None:
    def loop() -> None:
        while True:
            try:
                sum(range(100))
            except Exception:
                continue

    start = time.monotonic()
    with pytest.raises(OverdueError, match=r"not done within 0\.2 s"):
        call_within(0.2, loop)
    assert time.monotonic() - start < 30
    for _ in range(300):
        if all(thread.name != "vlmrl-limited" for thread in threading.enumerate()):
            return
        time.sleep(0.1)
    pytest.fail("the thread is still there")
