"""Peak memory of a piece of work, above the memory held before it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

from vlmrl.system.malloc import release_memory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Written to clear_refs, this makes Linux reset the peak (proc_pid_clear_refs(5))."""


def peak_bytes(work: Callable[[], object], where: torch.device) -> int | None:
    """Run `work` and return its peak memory in bytes, above the memory held before.

    On CUDA, PyTorch counts its allocations. On CPU the kernel counts the process's resident memory: free memory that
    `malloc` holds is returned first, and from here on `malloc` keeps none. That makes allocations slow: measure memory
    first, and time after `keep_memory()`, as in a worker. None where the kernel does not report the peak.
    """
    gc.collect()
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
        work()
        torch.cuda.synchronize(where)
        return int(torch.cuda.max_memory_allocated(where)) - before
    release_memory()
    if not _reset_peak():
        work()
        return None
    before = _resident("VmRSS")
    work()
    return max(0, _resident("VmHWM") - before)


def _reset_peak() -> bool:
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text(_RESET_PEAK)
    except (OSError, AttributeError):  # another kernel, another C library, or a sandbox that hides the file
        return False
    return True


def _resident(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert match is not None, f"{_STATUS} has no {field}"
    return int(match[1]) * 1024
