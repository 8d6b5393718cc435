"""Peak memory, measured in separate processes: this one would reuse free memory of its heap first."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vlmrl.commands.bench.memory import peak_bytes

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak")


def peaks_mib(*works: str) -> list[float]:
    """Return the peak of each piece of work in MiB; `make(n)` is an array of n MiB, in addition to a constant 64."""
    script = (
        "import torch; from vlmrl.commands.bench.memory import peak_bytes\n"
        "def make(mib): return torch.ones(mib * 2**20 // 4)\n"
        "held, cpu = make(64), torch.device('cpu')\n"
        f"print(*(peak_bytes(work, cpu) for work in ({', '.join(f'lambda: {work}' for work in works)},)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    if "None" in done.stdout:
        pytest.skip("the kernel does not let a process forget its peak")
    return [int(peak) / 2**20 for peak in done.stdout.split()]


def test_the_peak_is_above_the_memory_held_before() -> None:
    assert peaks_mib("[len(make(32)), len(make(96))]", "[make(32), make(96)]") == [
        pytest.approx(96, abs=8),
        pytest.approx(128, abs=8),
    ]


def test_each_peak_is_measured_anew() -> None:
    assert peaks_mib("make(128)", "make(16)") == [pytest.approx(128, abs=8), pytest.approx(16, abs=8)]


def test_the_work_runs_where_the_kernel_reports_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrl.commands.bench.memory._reset_peak", lambda: False)
    done: list[int] = []
    assert peak_bytes(lambda: done.append(1), CPU) is None
    assert done == [1]
