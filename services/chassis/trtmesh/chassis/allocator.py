"""Has the C library's allocator give the memory of large blocks back.

glibc maps a block apart above a threshold that grows with each such block that is freed, up to 32 MiB: after the first
large messages all others come from the heap, which keeps what lies below the last one in use. With 20 clients that send
messages of 6 MiB, this was 46 MiB.
"""

from __future__ import annotations

import ctypes

MAPPED_BYTES = 2**20
"""Least size of a block that is mapped apart."""
TRIMMED_BYTES = 2**23
"""Least free memory at the end of the heap that is given back."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_back_large_blocks() -> None:
    """Fixes the thresholds; does nothing where the C library has none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIMMED_BYTES)
