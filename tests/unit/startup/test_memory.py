"""What malloc is told, where it can be told."""

import ctypes
import subprocess
import sys

import pytest

from vlmrl.startup.memory import keep_memory

has_mallopt = hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.skipif(not has_mallopt, reason="the C library of this machine has no mallopt")
def test_memory_that_was_freed_stays_with_the_process() -> None:
    # 16 MiB are taken and freed again and again; the kernel is asked for new pages the first time alone.
    program = """
import ctypes, resource, sys
from vlmrl.startup.memory import keep_memory
assert keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    block = libc.malloc(16 * 2**20)
    ctypes.memset(block, 1, 16 * 2**20)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 1000  # ten times 4096 pages otherwise


def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_memory() is False
