"""Where a message becomes a request: small ones on the event loop, large ones in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from time import perf_counter
from typing import TypeAlias, TypeVar

from trtmesh.chassis.fair.large import LARGE_BYTES

T = TypeVar("T")

Held: TypeAlias = Callable[[], AbstractContextManager[object]]
"""A block in which a message counts as held."""


class LargeMessageThread:
    """Parses one large message of all doors at a time, then rests for as long as it took: running streams share the
    interpreter. Limits count before they copy, so none takes longer than a second."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parsing")
        self._entrance = asyncio.Lock()
        """Of what waits for its first turn: only one waits among those whose requests have begun, so that few requests
        exist in part."""
        self._turn = asyncio.Lock()
        self._rested_at = 0.0

    async def run(
        self,
        size: int,
        parse: Callable[[], T],
        *,
        begun: bool = False,
        held: Held = nullcontext,
    ) -> T:
        """The result of `parse` for a message of `size` bytes, or for the next form of a request that has `begun`.
        `held` is the block in which a large message waits and is read. A client that leaves before its turn takes its
        message along: a queue of the thread would keep it."""
        if size < LARGE_BYTES:
            return parse()
        with held():
            async with nullcontext() if begun else self._entrance:
                await self._turn.acquire()
            return await self._take_turn(parse)

    async def _take_turn(self, parse: Callable[[], T]) -> T:
        try:
            await asyncio.sleep(self._rested_at - perf_counter())
            loop = asyncio.get_running_loop()
            # Log lines carry the request id.
            running = loop.run_in_executor(self._thread, copy_context().run, self._parse, parse)
        except BaseException:
            self._turn.release()
            raise
        # The thread goes on after a client that leaves, and so does its turn.
        running.add_done_callback(self._end_turn)
        try:
            return await asyncio.shield(running)
        finally:
            # An error's frames have this one: a cycle would keep the message.
            del running

    def _end_turn(self, running: asyncio.Future[T]) -> None:
        self._turn.release()
        # An error that nobody awaits any more would be logged, and keep the message until then.
        if not running.cancelled():
            running.exception()

    def _parse(self, parse: Callable[[], T]) -> T:
        began = perf_counter()
        try:
            return parse()
        finally:
            ended = perf_counter()
            self._rested_at = ended + (ended - began)
