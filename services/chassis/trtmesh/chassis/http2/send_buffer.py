"""Queues bytes to be sent, without copies."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""Bytes in memory. A memoryview has a single dimension of bytes."""


class SendBuffer:
    """A queue of bytes, without copies."""

    __slots__ = ("_pieces", "size")

    def __init__(self) -> None:
        self._pieces: deque[Buffer] = deque()
        self.size = 0

    def append(self, data: Buffer) -> None:
        """Adds bytes. Their memory must not change until sent."""
        if data:
            self._pieces.append(data)
            self.size += len(data)

    def take(self, size: int) -> list[Buffer]:
        """Removes the first `size` bytes."""
        taken: list[Buffer] = []
        self.size -= size
        while size:
            piece = self._pieces.popleft()
            if len(piece) > size:
                view = memoryview(piece)
                piece = view[:size]
                self._pieces.appendleft(view[size:])
            taken.append(piece)
            size -= len(piece)
        return taken

    def clear(self) -> None:
        self._pieces.clear()
        self.size = 0
