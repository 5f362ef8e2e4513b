"""Parts in the messages of a fetch, copied into the receiver's blocks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from trtmesh.engine.handoff.checksums import crc32
from trtmesh.engine.handoff.copying import Copying
from trtmesh.engine.handoff.transports.transport import ReadFailed, ShardCopy
from trtmesh.engine.kv_memory import Bytes, KvMemory, Span

Band = tuple[int, int, Bytes]
"""Adjacent rows of a part: shard, first row, [rows, bytes]."""


SMALL_BYTES = 2**14
"""Smaller chunks are joined, to keep a part to few chunks."""


class Damaged(ReadFailed):
    """The checksum of a part differs."""


class StreamedPart:
    """A part under way. The bytes stay where received; the blocks are rows of each of the sender's shards."""

    def __init__(
        self, memory: KvMemory, copying: Copying, spans: Sequence[Span], rows: int, checksum: int
    ) -> None:
        """`spans` are the bytes of a block in each of the sender's shards; without a checksum, `checksum` is 0."""
        self._memory, self._copying, self._checksum = memory, copying, checksum
        self._spans, self._rows = spans, rows
        self.size = self.missing_bytes = rows * sum(last - first for first, last in spans)
        self.chunks: list[memoryview | bytearray] = []
        """The bytes so far."""
        self._complete: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether all bytes came. Not an exception: an exception would refer to the reader, and the reader to this."""
        if not self.missing_bytes:
            self._complete.set_result(True)

    def feed(self, data: memoryview) -> None:
        """Takes the next bytes, at most the missing ones. The bytes must not change until the part was read."""
        chunks = self.chunks
        if len(data) >= SMALL_BYTES:
            chunks.append(data)
        elif chunks and isinstance(chunks[-1], bytearray):
            chunks[-1] += data
        else:
            chunks.append(bytearray(data))
        self.missing_bytes -= len(data)
        if not self.missing_bytes and not self._complete.done():
            self._complete.set_result(True)

    def abandon(self) -> None:
        """No bytes follow."""
        if not self._complete.done():
            self._complete.set_result(False)

    async def read(self, copies: Sequence[ShardCopy]) -> None:
        """Copies the blocks, once all have arrived. Raises ReadFailed."""
        if not await self._complete:
            raise ReadFailed("the fetch ended within a part")
        await self._copying(self._scatter(copies))

    def _scatter(self, copies: Sequence[ShardCopy]) -> Iterator[None]:
        if self._checksum:
            yield from self._check()
        for shard, first_row, rows in self._bands():
            for each in copies:
                if each.source_shard == shard:
                    self._copy(each, first_row, rows)
            yield

    def _check(self) -> Iterator[None]:
        checksum = 0
        for chunk in self.chunks:
            checksum = crc32(chunk, checksum)
            yield
        if checksum != self._checksum:
            raise Damaged("the checksum of a part differs")

    def _copy(self, copy: ShardCopy, first_row: int, rows: Bytes) -> None:
        """Copies the blocks of a band."""
        wanted = np.asarray(copy.source_blocks, dtype=np.intp)
        first, last = np.searchsorted(wanted, (first_row, first_row + len(rows))).tolist()
        if first == last:
            return
        at, targets = wanted[first:last] - first_row, copy.target_blocks[first:last]
        everything = len(at) == len(rows)
        base = self._spans[copy.source_shard][0]
        for run in copy.runs:
            offset = run.source - base
            data = rows[:, offset : offset + run.size]
            data = data if everything else data[at]
            span = (run.target, run.target + run.size)
            self._memory.write(copy.target_shard, targets, span, data)

    def _bands(self) -> Iterator[Band]:
        chunks = deque(np.frombuffer(chunk, dtype=np.uint8) for chunk in self.chunks)
        for shard, (first, last) in enumerate(self._spans):
            size, row = last - first, 0
            while size and row < self._rows:
                rows = max(1, min(self._rows - row, len(chunks[0]) // size))
                yield shard, row, _taken(chunks, rows * size).reshape(rows, size)
                row += rows


def _taken(chunks: deque[Bytes], size: int) -> Bytes:
    """Removes the first bytes of the chunks; copies bytes of several chunks to one place."""
    taken: list[Bytes] = []
    while size:
        chunk = chunks.popleft()
        if len(chunk) > size:
            chunks.appendleft(chunk[size:])
            chunk = chunk[:size]
        taken.append(chunk)
        size -= len(chunk)
    return taken[0] if len(taken) == 1 else np.concatenate(taken)
