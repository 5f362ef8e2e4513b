"""Admits the messages of clients: when each is parsed and read, and how long a large message counts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from time import perf_counter
from typing import Protocol, TypeAlias, TypeVar

from trtmesh.chassis.fair.turns import after_rest

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LARGE_BYTES = 2**17
"""Least size of a large message. A smaller message takes at most 10 ms to parse, with any content, and does not count
once parsed."""

COST = 4
"""Memory of a parsed message in multiples of the serialized bytes, for a list of ids, the most common content."""

MOST_BYTES = 2**24
"""Most memory of several parsed messages. A handler reads a message while the next is parsed, so more need not
exist."""


class Backlog:
    """Limits the large messages in parsed form and unread. The others wait in order, serialized, in a fraction of the
    memory."""

    def __init__(self) -> None:
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._planned = False

    async def enter(self, size: int) -> None:
        """Waits for room for the parsed form of a message of `size` bytes, and counts the message."""
        if not self._waiting and self._has_room(size):
            self.add(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._plan()
            else:
                self.leave(size)
            raise

    def add(self, size: int) -> None:
        """Counts a message without waiting, because the handler is about to read."""
        self._held += COST * size

    def leave(self, size: int) -> None:
        """Stops counting a message after reading, or after passing the message to the handler, which may count again
        until the end of a rest. Others enter afterwards."""
        self._held -= COST * size
        self._plan()

    def _has_room(self, size: int) -> bool:
        return not self._held or self._held + COST * size <= MOST_BYTES

    def _plan(self) -> None:
        if self._waiting and not self._planned:
            self._planned = True
            after_rest(self._admit)

    def _admit(self) -> None:
        self._planned = False
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                if not self._has_room(size):
                    return
                self.add(size)
                turn.set_result(None)
            self._waiting.popleft()


Held: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes the block during which a message counts as held."""


class LargeMessageThread:
    """Parses one large message at a time, then rests for as long as the parsing took: running streams need the same
    interpreter. Limits of content keep each message below a second."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parsing")
        self._entrance = asyncio.Lock()
        """Held while a message waits for its first turn. Beside requests that have begun, only one message waits, so
        that few requests exist in part."""
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
        """Returns the result of `parse`: the request of a message of `size` bytes, or the next form of a request
        already `begun`. Small messages are parsed at once, on the event loop.

        A large message waits and is parsed within the block of `held`. If the client leaves before the turn, the
        message is freed; the queue of a thread would keep the message.
        """
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
        # If the client leaves, the thread still completes the work, and the turn lasts until then.
        running.add_done_callback(self._end_turn)
        try:
            return await asyncio.shield(running)
        finally:
            # An error refers to this frame: a cycle would keep the message.
            del running

    def _end_turn(self, running: asyncio.Future[T]) -> None:
        self._turn.release()
        # asyncio would log an unawaited error, and keep the message until then.
        if not running.cancelled():
            running.exception()

    def _parse(self, parse: Callable[[], T]) -> T:
        began = perf_counter()
        try:
            return parse()
        finally:
            ended = perf_counter()
            self._rested_at = ended + (ended - began)


Counting: TypeAlias = "Callable[[int], AbstractContextManager[object]]"
"""Makes the block during which a message of a number of bytes counts."""


class Parse(Protocol[T_co]):
    """Makes a request from a message."""

    def __call__(self, *, is_large: bool) -> T_co:
        """If the message `is_large`, defers long work."""


class MessageAdmission:
    """Admits the messages of a server, or of all doors of a router."""

    def __init__(self, counting: Counting = nullcontext) -> None:
        """`counting` makes the block of a request. Entering raises the refusal of a large message without room."""
        self.counting = counting
        self.backlog = Backlog()
        self.thread = LargeMessageThread()


class ReceivedMessage:
    """A message, as received by a handler."""

    __slots__ = ("_admission", "_begun", "_unread", "size")

    def __init__(
        self, admission: MessageAdmission, size: int, unread: Counting = nullcontext
    ) -> None:
        """`unread` makes the block of waiting for the first step of a large message, and of the step."""
        self._admission, self._unread = admission, unread
        self._begun = False
        self.size = size

    @property
    def is_large(self) -> bool:
        """Whether a thread reads it, maybe behind those of others."""
        return self.size >= LARGE_BYTES

    def admitted(self) -> AbstractContextManager[object]:
        """Returns the block for reading the message and serving the request. Entering raises the refusal of a large
        message without room."""
        return self._admission.counting(self.size)

    async def read(self, parse: Parse[T]) -> T:
        """Returns the request made from the message by `parse`."""
        if self.is_large:
            return await self.run(partial(parse, is_large=True))
        self._begun = True
        return parse(is_large=False)

    async def run(self, work: Callable[[], T], weight: int = 1) -> T:
        """Returns the result of a step of the request, which costs `weight` times the parsing of the message."""
        size, begun = self.size * weight, self._begun
        self._begun = True
        if size < LARGE_BYTES:
            return work()
        held = nullcontext if begun else partial(self._unread, self.size)
        return await self._admission.thread.run(size, work, begun=begun, held=held)
