"""Has the C library's allocator return the memory of large blocks.

glibc maps blocks above a threshold separately, and raises the threshold, up to 32 MiB, with each large block freed. So
after the first large messages all others come from the heap, and the heap keeps everything below the last used block:
46 MiB with 20 clients and messages of 6 MiB.
"""

from __future__ import annotations

import asyncio
import ctypes
from time import perf_counter

MAPPED_BYTES = 2**17
"""Least size of a separately mapped block."""
TRIMMED_BYTES = 2**23
"""Least free memory at the end of the heap to return."""

GIVE_BACK_SECONDS = 0.02
"""Between two searches for free pages. A fast flood takes 20 MiB meanwhile."""
GIVING_SECONDS = 0.5
"""How long free pages are searched for after much was held."""
MOST_SHARE = 0.1
"""Largest share of time for the searches: with a heap of 500 MiB in use each takes 13 ms."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_back_large_blocks() -> None:
    """Fixes the thresholds; does nothing where the C library has none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIMMED_BYTES)


class FreePages:
    """Returns free pages of the heap while much memory is held, and for a while after.

    A few small blocks at the top of the heap would keep all free pages below. After a flood of many small messages,
    then a few large ones, twice the allowed memory would be in use: in the heap, and in separately mapped blocks.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._until = 0.0
        self._planned = False

    def give_back_soon(self) -> None:
        """Gives them back in a moment, and again for a while."""
        if self._trim is not None:
            self._until = asyncio.get_running_loop().time() + GIVING_SECONDS
            if not self._planned:
                self._plan(GIVE_BACK_SECONDS)

    def _plan(self, seconds: float) -> None:
        self._planned = True
        asyncio.get_running_loop().call_later(seconds, self._give_back)

    def _give_back(self) -> None:
        assert self._trim is not None
        began = perf_counter()
        self._trim(0)
        spent = perf_counter() - began
        self._planned = False
        if asyncio.get_running_loop().time() < self._until:
            self._plan(max(GIVE_BACK_SECONDS, spent / MOST_SHARE))
