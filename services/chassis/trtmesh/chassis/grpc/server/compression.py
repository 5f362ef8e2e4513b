"""Compresses large answers on a thread: a megabyte takes tens of milliseconds, and the event loop serves others."""

from __future__ import annotations

import asyncio
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

from trtmesh.chassis.grpc.compression_settings import CompressionSettings
from trtmesh.chassis.grpc.messages import WINDOW_BITS
from trtmesh.chassis.grpc.server.headers import RequestHeaders

LEVEL = 1
"""zlib's fastest level. Other levels take two to five times as long, and save a tenth of the size of text."""

PIECE_BYTES = 2**18
"""Bytes compressed at once, several milliseconds: messages of several calls take turns."""

SAMPLE_BYTES = 2**16
"""Bytes compressed as a sample, from the middle of a message: the beginning has names and shapes."""

MIN_BYTES = 2**14
"""Smallest message to compress. TCP sends a smaller message without waiting for an acknowledgement, so compression
would save no time."""

WORTHWHILE = 7 / 8
"""Largest size of a compressed sample, relative to the sample."""


class Compressor:
    """Compresses answers of a server, a piece at a time."""

    def __init__(self, settings: CompressionSettings) -> None:
        self._never = settings.answers == "never"
        self._unasked = tuple(WINDOW_BITS) if settings.answers == "accepted" else ()
        self._thread = ThreadPoolExecutor(1, "compression")

    def encoding_of(self, request: RequestHeaders) -> str:
        """The grpc-encoding of the answers to a request; identity if they are not compressed."""
        if request.encoding == "identity" and not self._unasked:
            return "identity"
        wanted = [each for each in (request.encoding, *self._unasked) if each in WINDOW_BITS]
        if self._never or not wanted:
            return "identity"
        accepted = [name.strip() for name in request.accepted_encodings.split(",")]
        return next((each for each in wanted if each in accepted), "identity")

    def most_plain_bytes(self, encoding: str) -> int:
        """Returns the size of the largest message sent uncompressed in any case."""
        return sys.maxsize if encoding == "identity" else MIN_BYTES - 1

    async def compress(self, message: bytes, encoding: str) -> list[bytes] | None:
        """Returns the pieces of the compressed message, or None if hardly smaller."""
        loop, window_bits = asyncio.get_running_loop(), WINDOW_BITS[encoding]
        view = memoryview(message)
        middle = max(0, len(view) - SAMPLE_BYTES) // 2
        sample = view[middle : middle + SAMPLE_BYTES]
        compressed = await loop.run_in_executor(self._thread, zlib.compress, sample, LEVEL)
        if len(compressed) > WORTHWHILE * len(sample):
            return None
        compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, window_bits)
        pieces = list[bytes]()
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            pieces.append(await loop.run_in_executor(self._thread, compressor.compress, piece))
        pieces.append(await loop.run_in_executor(self._thread, compressor.flush))
        return pieces

    def close(self) -> None:
        """Ends the thread, after the end of all calls."""
        self._thread.shutdown(wait=False, cancel_futures=True)
