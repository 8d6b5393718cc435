import sys

import pytest
import torch

from vlmrl.bench.memory import peak_bytes

CPU = torch.device("cpu")
MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak")


def peak_mib(work: object) -> float:
    found = peak_bytes(work, CPU)  # type: ignore[arg-type]
    if found is None:
        pytest.skip("the kernel does not let this process forget its peak")
    return found / MIB


def test_the_peak_is_what_was_held_at_the_same_time_and_not_what_was_there_before() -> None:
    held = torch.ones(64 * MIB // 4)

    def work() -> None:
        torch.ones(32 * MIB // 4)
        torch.ones(96 * MIB // 4)

    assert peak_mib(work) == pytest.approx(96, abs=8)
    assert held.sum() == 64 * MIB // 4


def test_a_peak_is_not_the_one_of_the_work_before() -> None:
    assert peak_mib(lambda: torch.ones(128 * MIB // 4)) == pytest.approx(128, abs=8)
    assert peak_mib(lambda: torch.ones(16 * MIB // 4)) == pytest.approx(16, abs=8)


def test_work_is_done_where_the_kernel_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrl.bench.memory._forget_peak", lambda: False)
    done: list[int] = []
    assert peak_bytes(lambda: done.append(1), CPU) is None
    assert done == [1]
