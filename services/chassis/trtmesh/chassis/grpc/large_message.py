"""Counts the fields of large messages, then parses them.

Parsing holds the interpreter until it is done, in a thread too: a message of 20 MiB of empty fields takes 700 ms, one
within the limits up to 90 ms. Counting goes on in turns, and parsing is part of the last: it is paid with the turns
that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from trtmesh.chassis.grpc.messages import BadMessage, Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits of a large message of a stranger."""

    fields: int = 2**18
    """Those of its parts included."""
    numbers: int = 3 * 2**20
    """Numbers in lists, with 64-bit numbers counted twice: a prompt's ids and a list of every other kind. They are
    parsed in 50 ms."""
    text_bytes: int = 2**24
    """Bytes of strings: to check that they are UTF-8, and to decode them, takes up to 2 ms for each
    million."""


STEP_FIELDS, STEP_BYTES = 64, 2**19
"""Fields, and bytes of numbers, counted at once."""

MAX_VARINT_BYTES = 10

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_FIXED = frozenset(
    (
        *(FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32),
        *(FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64),
    )
)
"""Types of numbers of four or eight bytes."""
_LONG = frozenset(
    (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_SINT64)
)
"""Types of variable length that take 8 bytes when they are parsed."""
_NOT_LAST = bytes(range(128, 256))
"""Bytes that do not end a number."""


def parse_in_steps(
    data: Message,
    descriptor: Descriptor,
    parse: Callable[[Message], T],
    limits: MessageLimits | None,
) -> Generator[None, None, T]:
    """Counts the fields of a message, unless it has no `limits`, and parses it. Raises BadMessage for a message of too
    many fields."""
    if limits is not None:
        yield from _count(memoryview(data), descriptor, limits)
    return parse(data)


def _count(data: memoryview, descriptor: Descriptor, limits: MessageLimits) -> Iterator[None]:
    """Raises BadMessage beyond the limits. Passes over what is malformed: its parser says what is wrong."""
    counts = _Counts(limits)
    parts = [_Part(0, len(data), descriptor.fields_by_number)]
    while parts:
        with suppress(IndexError):
            yield from counts.add_fields(data, parts.pop(), parts)
    counts.check()


class _Part(NamedTuple):
    """Where a message within the message begins and ends, and its fields."""

    first: int
    end: int
    known: Any


@dataclass(slots=True)
class _Counts:
    """What a message contains so far."""

    limits: MessageLimits
    fields: int = 0
    numbers: int = 0
    text_bytes: int = 0

    def add_fields(self, data: memoryview, part: _Part, parts: list[_Part]) -> Iterator[None]:
        """Counts the fields of a part, in turns, and adds the parts within it. Raises IndexError where a malformed part
        ends."""
        at, end, known = part
        while at < end:
            self.fields += 1
            if self.fields % STEP_FIELDS == 0:
                self.check()
                yield
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _VARINT:
                _, at = _varint(data, at)
            elif kind == _LENGTH:
                size, at = _varint(data, at)
                field, last = known.get(tag >> 3), min(at + size, end)
                if field is not None and size and field.message_type is not None:
                    parts.append(_Part(at, last, field.message_type.fields_by_number))
                elif field is not None:
                    yield from self.add(data[at:last], field.type)
                at += size
            elif kind == _FIXED_64:
                at += 8
            elif kind == _FIXED_32:
                at += 4

    def add(self, content: memoryview, kind: int) -> Iterator[None]:
        """Counts the content of a field of a type, in turns."""
        if kind == FieldDescriptor.TYPE_STRING:
            self.text_bytes += len(content)
        elif kind in _FIXED:
            self.numbers += len(content) // 4
        elif kind != FieldDescriptor.TYPE_BYTES:
            weight = 2 if kind in _LONG else 1
            for first in range(0, len(content), STEP_BYTES):
                piece = bytes(content[first : first + STEP_BYTES])
                self.numbers += weight * len(piece.translate(None, _NOT_LAST))
                self.check()
                yield
        self.check()

    def check(self) -> None:
        """Raises BadMessage beyond a limit."""
        limits = self.limits
        for count, most, what, instead in (
            (self.fields, limits.fields, "fields", "large tensors as raw contents"),
            (self.numbers, limits.numbers, "numbers in lists", "large tensors as raw contents"),
            (self.text_bytes, limits.text_bytes, "bytes of text", "fewer texts in a request"),
        ):
            if count > most:
                raise BadMessage(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"the message has more than {most} {what}; send {instead}",
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
