"""Memory for the large messages of a fetch."""

from __future__ import annotations

from collections.abc import Iterable

from trtmesh.chassis.http2.pieces import Buffer

MESSAGE_BYTES = 2**20 + 64
"""A chunk of the largest size, with its fields."""


class MessageMemory:
    """Gives memory and takes it back: new memory costs a page fault for every few KiB."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self.closed = False
        """Whether nothing is kept any more."""

    def take(self, size: int) -> memoryview:
        """Memory for a message."""
        if size > MESSAGE_BYTES:
            return memoryview(bytearray(size))
        memory = self._free.pop() if self._free else bytearray(MESSAGE_BYTES)
        return memoryview(memory)[:size]

    def give_back(self, chunks: Iterable[Buffer]) -> None:
        """Takes the memory of chunks that nobody reads any more."""
        if self.closed:
            return
        for chunk in chunks:
            memory = chunk.obj if isinstance(chunk, memoryview) else None
            if isinstance(memory, bytearray) and len(memory) == MESSAGE_BYTES:
                self._free.append(memory)

    def close(self) -> None:
        """Frees the memory, and what is given back later: a fetch is over long before its sequence."""
        self.closed = True
        self._free.clear()
