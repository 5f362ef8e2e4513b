"""Counts the fields of large messages, then parses them.

Parsing holds the interpreter until it is done, in a thread too: a message of 20 MiB of empty fields takes 700 ms, one
within the limits up to 90 ms. Counting goes on in turns, and parsing is part of the last: it is paid with the turns
that follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from trtmesh.chassis.grpc.messages import BadMessage, Message
from trtmesh.chassis.http2.turns import Line

LARGE_BYTES = 2**17
"""Least size of a message whose fields are counted: smaller ones are parsed in 5 ms, whatever they are."""

MAX_FIELDS = 2**18
"""Most fields of a large message, those of its parts included."""

MAX_NUMBERS = 3 * 2**20
"""Most numbers of variable length in lists: a prompt's ids and a list of every other kind. They are parsed in 50 ms."""

STEP_FIELDS, STEP_BYTES = 64, 2**19
"""Fields, and bytes of numbers, counted at once."""

MAX_VARINT_BYTES = 10

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_COPIED = frozenset(
    (
        *(FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES),
        *(FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32),
        *(FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64),
    )
)
"""Types whose content is copied as it is."""
_NOT_LAST = bytes(range(128, 256))
"""Bytes that do not end a number."""


class LargeMessage:
    """One message, counted and parsed in turns."""

    def __init__(
        self, data: Message, descriptor: Descriptor, parse: Callable[[Message], Any]
    ) -> None:
        self._steps = self._count_and_parse(data, descriptor, parse)
        self._parsed: Any = None
        self._problem: BadMessage | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, line: Line) -> Any:
        """What `parse` returns. Raises BadMessage as `parse` does, and for a message of too many fields."""
        line.take(self)
        try:
            await self._done
        finally:
            self._steps = iter(())
        if self._problem is not None:
            try:
                raise self._problem
            finally:
                # A cycle would keep the message.
                self._problem = None
        return self._parsed

    def go_on(self, until: float) -> bool:
        try:
            for _ in self._steps:
                if perf_counter() >= until:
                    return True
        except BadMessage as problem:
            self._problem = problem
        return False

    def completed(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _count_and_parse(
        self, data: Message, descriptor: Descriptor, parse: Callable[[Message], Any]
    ) -> Iterator[None]:
        # The parser of a malformed message says what is wrong.
        with suppress(IndexError):
            yield from _count(memoryview(data), descriptor)
        self._parsed = parse(data)


def _count(data: memoryview, descriptor: Descriptor) -> Iterator[None]:
    """Raises BadMessage beyond the limits, and IndexError at the end of a malformed message."""
    fields = numbers = 0
    parts: list[tuple[int, int, Any]] = [(0, len(data), descriptor.fields_by_number)]
    """Where the messages begin and end that are still to be read, and their fields."""
    while parts:
        at, end, known = parts.pop()
        while at < end:
            fields += 1
            if fields % STEP_FIELDS == 0:
                _check(fields, numbers)
                yield
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _VARINT:
                _, at = _varint(data, at)
            elif kind == _LENGTH:
                size, at = _varint(data, at)
                field = known.get(tag >> 3)
                if field is not None and size and field.message_type is not None:
                    parts.append((at, min(at + size, end), field.message_type.fields_by_number))
                elif field is not None and field.type not in _COPIED:
                    for first in range(at, min(at + size, end), STEP_BYTES):
                        piece = bytes(data[first : min(first + STEP_BYTES, at + size)])
                        numbers += len(piece.translate(None, _NOT_LAST))
                        _check(fields, numbers)
                        yield
                at += size
            elif kind == _FIXED_64:
                at += 8
            elif kind == _FIXED_32:
                at += 4
    _check(fields, numbers)


def _check(fields: int, numbers: int) -> None:
    if fields > MAX_FIELDS:
        raise BadMessage(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the message has more than {MAX_FIELDS} fields; send large tensors as raw contents",
        )
    if numbers > MAX_NUMBERS:
        raise BadMessage(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the message has more than {MAX_NUMBERS} numbers in lists; send large tensors as raw contents",
        )


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value = byte & 0x7F
    for place in range(1, MAX_VARINT_BYTES):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise IndexError("a number does not end")
