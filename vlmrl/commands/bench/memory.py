"""The most memory that a piece of work takes above what was held before it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

from vlmrl.system.memory import give_back_memory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What Linux takes, written to clear_refs, for an order to forget the peak (proc_pid_clear_refs(5))."""


def peak_bytes(work: Callable[[], object], where: torch.device) -> int | None:
    """Run `work` and return the most bytes that it held at once, above what was held before.

    On CUDA, PyTorch counts what it allocates. On CPU it is the process's resident memory, which the kernel counts; what
    `malloc` keeps for later is given back first, and from here on it keeps nothing. Memory is slow to take anew:
    measure first, and time after `keep_memory()`, as in a worker. None where the kernel does not tell.
    """
    gc.collect()
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
        work()
        torch.cuda.synchronize(where)
        return int(torch.cuda.max_memory_allocated(where)) - before
    give_back_memory()
    if not _forget_peak():
        work()
        return None
    before = _resident("VmRSS")
    work()
    return max(0, _resident("VmHWM") - before)


def _forget_peak() -> bool:
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text(_RESET_PEAK)
    except (OSError, AttributeError):  # another kernel, another C library, or a sandbox that hides the file
        return False
    return True


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"{_STATUS} has no {field}"
    return int(found[1]) * 1024
