"""Has the C library's allocator give the memory of large blocks back.

glibc maps a block apart above a threshold that grows with each such block that is freed, up to 32 MiB: after the first
large messages all others come from the heap, which keeps what lies below the last one in use. With 20 clients that send
messages of 6 MiB, this was 46 MiB.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

MAPPED_BYTES = 2**17
"""Least size of a block that is mapped apart."""
TRIMMED_BYTES = 2**23
"""Least free memory at the end of the heap that is given back."""

GIVE_BACK_SECONDS = 0.02
"""Between two searches for free pages: a fast flood takes 20 MiB meanwhile, whose return takes 2 ms."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_back_large_blocks() -> None:
    """Fixes the thresholds; does nothing where the C library has none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIMMED_BYTES)


class FreePages:
    """Gives free pages of the heap back while much is held.

    A few small blocks keep all others below them. A flood that begins with many small messages and goes on with few
    large ones would take twice what may be held: once in the heap, and once in blocks that are mapped apart.
    """

    def __init__(self, is_much: Callable[[], bool]) -> None:
        self._is_much = is_much
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._planned = False

    def give_back_soon(self) -> None:
        """Gives them back in a moment, and again while much is held."""
        if not self._planned and self._trim is not None:
            self._planned = True
            asyncio.get_running_loop().call_later(GIVE_BACK_SECONDS, self._give_back)

    def _give_back(self) -> None:
        assert self._trim is not None
        self._planned = False
        self._trim(0)
        if self._is_much():
            self.give_back_soon()
