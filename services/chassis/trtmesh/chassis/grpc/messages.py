"""Messages of a gRPC call in a stream of bytes (gRPC over HTTP/2, "Length-Prefixed-Message")."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import grpc

PREFIX = struct.Struct(">BI")
"""Whether the message is compressed, and its bytes."""


class BadMessage(Exception):
    """A message that cannot be taken; `status` ends its call."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageReader:
    """Puts the messages of one call together. `most_bytes` bounds each, compressed and not."""

    def __init__(self, encoding: str, most_bytes: int) -> None:
        self.encoding = encoding
        """How compressed messages are compressed."""
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self.missing = 0
        """Bytes that the message lacks which is on its way; 0 between two messages and before its size is known."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are whole now. Raises BadMessage."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= PREFIX.size:
                compressed, size = PREFIX.unpack_from(buffer, at)
                if size > self._most_bytes:
                    raise self._too_large(size)
                end = at + PREFIX.size + size
                self.missing = max(0, end - len(buffer))
                if self.missing:
                    return
                body = bytes(buffer[at + PREFIX.size : end])
                at = end
                yield self._decompressed(body) if compressed else body
        finally:
            del buffer[:at]

    def check_end(self) -> None:
        """Raises BadMessage where the bytes end in the middle of a message."""
        if self._buffer:
            raise BadMessage(grpc.StatusCode.INTERNAL, "the last message is cut off")

    def _decompressed(self, body: bytes) -> bytes:
        window_bits = _WINDOW_BITS.get(self.encoding)
        if window_bits is None:
            raise BadMessage(
                grpc.StatusCode.UNIMPLEMENTED,
                f"a message is compressed, and grpc-encoding is {self.encoding[:40]!r}:"
                f" use {' or '.join(_WINDOW_BITS)}",
            )
        unpack = zlib.decompressobj(window_bits)
        try:
            data = unpack.decompress(body, self._most_bytes + 1)
        except zlib.error as error:
            raise BadMessage(
                grpc.StatusCode.INTERNAL, f"a message cannot be decompressed: {error}"
            ) from error
        if len(data) > self._most_bytes:
            raise self._too_large(len(data))
        if not unpack.eof:
            raise BadMessage(
                grpc.StatusCode.INTERNAL, "a message cannot be decompressed: its end is missing"
            )
        return data

    def _too_large(self, size: int) -> BadMessage:
        return BadMessage(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {self._most_bytes})",
        )


_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""By encoding; zlib knows the format by them."""
