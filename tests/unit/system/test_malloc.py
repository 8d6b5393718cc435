"""Options of malloc, where the C library has them."""

import ctypes
import subprocess
import sys

import pytest

from vlmrl.system.malloc import keep_memory

has_mallopt = hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.skipif(not has_mallopt, reason="the C library of this machine has no mallopt")
def test_freed_memory_stays_with_the_process() -> None:
    # 64 MiB, twice the largest bound that glibc takes, come and go; the kernel is asked for pages the first time alone.
    program = """
import ctypes, resource, sys
from vlmrl.system.malloc import keep_memory
assert keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    block = libc.malloc(64 * 2**20)
    ctypes.memset(block, 1, 64 * 2**20)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 1000  # ten times 16384 pages otherwise


def test_other_c_libraries_are_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_memory() is False


@pytest.mark.skipif(not has_mallopt, reason="the C library of this machine has no mallopt")
def test_released_memory_leaves_the_process() -> None:
    # 64 blocks of a megabyte, of which every second is freed: those that stay would hold a heap up.
    program = """
import ctypes, os
from vlmrl.system.malloc import release_memory, keep_memory
keep_memory()
assert release_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
blocks = [libc.malloc(2**20) for _ in range(64)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
before = resident()
for block in blocks[::2]:
    libc.free(block)
print(before - resident())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) > 31 * 2**20
