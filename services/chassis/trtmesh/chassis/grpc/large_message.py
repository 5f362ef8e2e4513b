"""Counts the fields of large messages, then parses them.

Parsing holds the interpreter to the end, even in a thread: 700 ms for 20 MiB of empty fields, up to 90 ms within the
limits. Counting runs in turns. Parsing is part of the last turn, at the expense of the following turns.
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
    """Includes the fields of nested messages."""
    numbers: int = 3 * 2**20
    """Numbers in lists, with 64-bit numbers counted twice: a prompt's ids and a list of every other kind. They are
    parsed in 50 ms."""
    text_bytes: int = 2**24
    """Bytes of strings. Checking and decoding UTF-8 takes up to 2 ms a million."""


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
"""Types of variable length that take 8 bytes in parsed form."""
_NOT_LAST = bytes(range(128, 256))
"""Values of a byte with another byte of the same number to follow."""


def parse_in_steps(
    data: Message,
    descriptor: Descriptor,
    parse: Callable[[Message], T],
    limits: MessageLimits | None,
) -> Generator[None, None, T]:
    """Counts the fields of a message, if there are `limits`, and parses the message. Raises BadMessage beyond the
    limits."""
    if limits is not None:
        yield from _count(memoryview(data), descriptor, limits)
    return parse(data)


def _count(data: memoryview, descriptor: Descriptor, limits: MessageLimits) -> Iterator[None]:
    """Raises BadMessage beyond the limits. Skips malformed parts: the parser reports them."""
    counts = _Counts(limits)
    parts = [_Part(0, len(data), descriptor.fields_by_number)]
    while parts:
        with suppress(IndexError):
            yield from counts.add_fields(data, parts.pop(), parts)
    counts.check()


class _Part(NamedTuple):
    """The position and the fields of a nested message."""

    first: int
    end: int
    known: Any


@dataclass(slots=True)
class _Counts:
    limits: MessageLimits
    fields: int = 0
    numbers: int = 0
    text_bytes: int = 0

    def add_fields(self, data: memoryview, part: _Part, parts: list[_Part]) -> Iterator[None]:
        """Counts the fields of a part, in turns, and adds the nested parts. Raises IndexError at the end of a malformed
        part."""
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
    """Returns the number at a place, and the place after the number."""
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
