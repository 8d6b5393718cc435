"""Makes a process on CPU keep the memory that it frees, which a training pass takes again at once."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""glibc's malloc.h."""
_LARGEST = 32 * 2**20
"""The largest block that glibc may be told to take from the heap rather than to map anew."""


def keep_memory() -> bool:
    """Tell glibc, for this process, to reuse large blocks instead of handing them back; whether it took the order.

    Measured on two cores: an optimizer step of a 13M model with eight images took about 3 s instead of 4.9 s.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    orders = ((_M_MMAP_THRESHOLD, _LARGEST), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 8 * _LARGEST))
    return all(mallopt(ctypes.c_int(what), ctypes.c_int(value)) == 1 for what, value in orders)
