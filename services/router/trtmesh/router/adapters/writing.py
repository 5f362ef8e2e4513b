"""Writes brought adapters to the directory: one batch after another, with bounded contents in the queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.router.adapters.registry import Entry, Key

Brought = tuple[Entry, AdapterContent]

Write = Callable[[Sequence[Brought]], Awaitable[None]]


class Writing:
    """Adapters that are queued or being written."""

    def __init__(self, most_bytes: int, write: Write) -> None:
        self._most_bytes = most_bytes
        self._write = write
        self._size_bytes = 0
        self._digests: Counter[str] = Counter()
        self._queue: dict[Key, Brought] = {}
        self._batch: dict[Key, Brought] = {}
        self._task: asyncio.Task[None] | None = None

    def put(self, entry: Entry, content: AdapterContent) -> bool:
        """Queues an adapter in place of older weights of the number. Returns False without room; a single adapter
        always has room."""
        if (underway := self._queue.get(entry.key) or self._batch.get(entry.key)) is not None:
            if underway[0] == entry:
                return True
            if entry.key in self._queue:
                self._release(self._queue.pop(entry.key))
        if self._digests and self._size_bytes + content.size_bytes > self._most_bytes:
            return False
        self._queue[entry.key] = entry, content
        self._size_bytes += content.size_bytes
        self._digests[entry.current.digest] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return True

    def holds(self, digest: str) -> bool:
        """Whether a content must stay in memory because its file is not written yet."""
        return digest in self._digests

    async def flush(self) -> None:
        """Waits until everything queued is written."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._queue:
            self._batch, self._queue = self._queue, {}
            try:
                await self._write([*self._batch.values()])
            finally:
                for brought in self._batch.values():
                    self._release(brought)
                self._batch = {}

    def _release(self, brought: Brought) -> None:
        entry, content = brought
        self._size_bytes -= content.size_bytes
        self._digests[entry.current.digest] -= 1
        if not self._digests[entry.current.digest]:
            del self._digests[entry.current.digest]
