"""Memory for the large messages of fetches, sent and received."""

from __future__ import annotations

import weakref

import numpy as np

MESSAGE_BYTES = 2**20 + 64
"""A chunk of the largest size, with its fields."""

LENT_BYTES = range(MESSAGE_BYTES // 2, MESSAGE_BYTES + 1)
"""Sizes that memory is lent for: at least half of it is used. Others get memory of their own."""

MAX_KEPT = 32
"""Messages whose memory is kept: as many as may wait to be copied."""


class MessageMemory:
    """Lends memory, and lends it again once nothing refers to it: new memory costs a page fault for every few KiB.

    A transport may hold a message long after it was sent. Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        """Memory for a message, with content of earlier ones."""
        if size not in LENT_BYTES:
            return memoryview(bytearray(size))
        try:
            memory = self._free.pop()
        except IndexError:
            memory = bytearray(MESSAGE_BYTES)
        # Views refer to the array, which ends with the last of them.
        lent = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent.data[:size]

    def _give_back(self, memory: bytearray) -> None:
        if len(self._free) < MAX_KEPT:
            self._free.append(memory)
