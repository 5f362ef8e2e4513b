"""The messages with a part's bytes: chunks of KV, serialized without a copy, and the memory of large messages."""

from __future__ import annotations

import weakref

import numpy as np
from trtmesh.v1 import kv_transfer_pb2 as pb

Chunk = memoryview
"""The bytes of a KvChunk."""

MESSAGE_BYTES = 2**20 + 64
"""A chunk of the largest size, with fields."""

LENT_BYTES = range(MESSAGE_BYTES // 2, MESSAGE_BYTES + 1)
"""Sizes served from lent memory, at least half used. Others get memory of their own."""

MAX_KEPT = 32
"""Number of messages to keep memory for: as many as may wait to be copied."""

_LENGTH_DELIMITED = 2


def _tag(field: int) -> bytes:
    return bytes((field << 3 | _LENGTH_DELIMITED,))


_CHUNK = _tag(pb.FetchResponse.CHUNK_FIELD_NUMBER)
_DATA = _tag(pb.KvChunk.DATA_FIELD_NUMBER)


def head_of(size: int) -> bytes:
    """Returns the bytes before a chunk's data of `size` bytes in its FetchResponse."""
    head = _DATA + _varint(size)
    return _CHUNK + _varint(len(head) + size) + head


def parse(message: bytes | memoryview) -> pb.FetchResponse | Chunk:
    """Parses a FetchResponse. A chunk received into given memory stays there."""
    if isinstance(message, memoryview):
        data = _data_of(message)
        if data is not None:
            return data
        message = bytes(message)
    return pb.FetchResponse.FromString(message)


def _data_of(message: memoryview) -> Chunk | None:
    """Returns the bytes of a chunk. Returns None for messages left to protobuf, such as a chunk in another form."""
    chunk = _last_field(message, _CHUNK)
    return None if chunk is None else _last_field(chunk, _DATA)


def _last_field(message: memoryview, tag: bytes) -> memoryview | None:
    """The content of a message with a single field of this tag."""
    if message[:1] != tag:
        return None
    size = shift = 0
    for at, byte in enumerate(message[1:11], 2):
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return message[at:] if size == len(message) - at else None
        shift += 7
    return None


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class MessageMemory:
    """Lends memory, and lends the same again without references: new memory costs a page fault for every few KiB.

    A transport may hold a sent message for long. Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        """Memory for a message, with content of earlier messages."""
        if size not in LENT_BYTES:
            return memoryview(bytearray(size))
        try:
            memory = self._free.pop()
        except IndexError:
            memory = bytearray(MESSAGE_BYTES)
        # Views refer to the array, and the array ends with the last view.
        lent = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent.data[:size]

    def _give_back(self, memory: bytearray) -> None:
        if len(self._free) < MAX_KEPT:
            self._free.append(memory)
