"""Admits the messages of clients: when each is read, and that a large one counts until its request ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from trtmesh.chassis.fair.large import LARGE_BYTES
from trtmesh.chassis.fair.large_message_thread import LargeMessageThread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Counting: TypeAlias = "Callable[[int], AbstractContextManager[object]]"
"""Makes a block in which a message of so many bytes counts."""


class Parse(Protocol[T_co]):
    """Makes a request of a message."""

    def __call__(self, *, is_large: bool) -> T_co:
        """Leaves out what would hold the interpreter for long, if the message `is_large`."""


class MessageAdmission:
    """Admits the messages of all doors of a process."""

    def __init__(self, counting: Counting = nullcontext) -> None:
        """`counting` makes the block of a request. Entering raises the refusal of a large one that has no room."""
        self.counting = counting
        self.thread = LargeMessageThread()


class ReceivedMessage:
    """A message that a handler got."""

    __slots__ = ("_admission", "_begun", "_unread", "size")

    def __init__(
        self, admission: MessageAdmission, size: int, unread: Counting = nullcontext
    ) -> None:
        """`unread` makes the block in which a large message waits for its first step."""
        self._admission, self._unread = admission, unread
        self._begun = False
        self.size = size

    def admitted(self) -> AbstractContextManager[object]:
        """The block in which the message is read and its request served. Entering raises the refusal of a large one
        that has no room."""
        return self._admission.counting(self.size)

    async def read(self, parse: Parse[T]) -> T:
        """Returns the request that `parse` makes of the message."""
        return await self.run(partial(parse, is_large=self.size >= LARGE_BYTES))

    async def run(self, work: Callable[[], T], weight: int = 1) -> T:
        """Returns the result of a step of the request, which takes `weight` times as long as to parse the message."""
        size, begun = self.size * weight, self._begun
        self._begun = True
        if size < LARGE_BYTES:
            return work()
        held = nullcontext if begun else partial(self._unread, self.size)
        return await self._admission.thread.run(size, work, begun=begun, held=held)
