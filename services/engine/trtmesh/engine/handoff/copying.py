"""Copies KV to and from messages, in steps of about 1 MiB."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from time import perf_counter

from trtmesh.engine.kv_memory import HostMemory, KvMemory

TURN_SECONDS = 0.0003
"""Time of all copies in a pass of the event loop. A turn ends after the step in progress at this time."""

Copying = Callable[[Iterator[None]], Awaitable[None]]
"""Takes all steps of a copy. Raises the error of a step."""


def copying_of(memory: KvMemory, threads: Executor) -> Copying:
    """How a worker with KV in `memory` copies. A step in host memory takes less time than two threads need to pass the
    interpreter's lock back and forth; one in device memory waits for the device."""
    pools = map(memory.memory, range(len(memory.shards)))
    if all(isinstance(pool, HostMemory) for pool in pools):
        return InPasses()
    return InThreads(threads)


class InPasses:
    """Copies on the event loop. Copies alternate, each for a short turn, once per pass."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __call__(self, steps: Iterator[None]) -> None:
        while True:
            async with self._turn:
                until = perf_counter() + TURN_SECONDS
                for _ in steps:
                    if perf_counter() >= until:
                        break
                else:
                    return
                await asyncio.sleep(0)


class InThreads:
    """Copies in threads, beside the event loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads

    async def __call__(self, steps: Iterator[None]) -> None:
        # The queue takes all steps and keeps none.
        exhausted: deque[None] = deque(maxlen=0)
        await asyncio.get_running_loop().run_in_executor(self._threads, exhausted.extend, steps)
