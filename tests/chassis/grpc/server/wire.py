"""A client with scripted frames, valid or not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import TypeAlias

from chassis.grpc.server.conftest import Example
from hpack import Decoder, Encoder
from trtmesh.chassis.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    MAX_WINDOW_SIZE,
    PREFACE,
    ErrorCode,
    Frame,
    FrameType,
    Setting,
    frame,
    settings,
)

Breach: TypeAlias = "bytes | Callable[[Wire], bytes]"
"""Invalid frames; built by a connection if they have headers."""

NOTHING: Mapping[str, str | None] = {}

REQUEST: Mapping[str, str | None] = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/example.Service/Echo",
    ":authority": "example",
    "te": "trailers",
    "content-type": "application/grpc",
}


OPEN = 1
"""A client's first stream."""


def raw_settings(*values: tuple[int, int]) -> bytes:
    """A SETTINGS frame, possibly with invalid names and values."""
    payload = b"".join(n.to_bytes(2) + v.to_bytes(4) for n, v in values)
    return frame(FrameType.SETTINGS, 0, 0, payload)


def message(body: bytes, *, compressed: bool = False) -> bytes:
    """A gRPC message with its prefix."""
    return bytes((compressed,)) + len(body).to_bytes(4) + body


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.encoder = Encoder()
        self._decoder = Decoder()

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    def made(self, breach: Breach) -> bytes:
        return breach if isinstance(breach, bytes) else breach(self)

    async def send_all(self, frames: Iterator[bytes]) -> None:
        """Sends as fast as they are taken."""
        while batch := b"".join(islice(frames, 1000)):
            self.send(batch)
            await self.writer.drain()

    def block(self, method: str, changes: Mapping[str, str | None] = NOTHING) -> bytes:
        """The header block of a request; None removes a header."""
        fields = {**REQUEST, ":path": f"/example.Service/{method}", **changes}
        return bytes(self.encoder.encode([(k, v) for k, v in fields.items() if v is not None]))

    def call(
        self,
        stream: int,
        method: str = "Echo",
        flags: int = 0,
        changes: Mapping[str, str | None] = NOTHING,
    ) -> bytes:
        """The HEADERS frame of a request."""
        return frame(FrameType.HEADERS, END_HEADERS | flags, stream, self.block(method, changes))

    def data(self, stream: int, body: bytes, flags: int = END_STREAM) -> bytes:
        """A DATA frame with a whole message."""
        return frame(FrameType.DATA, flags, stream, message(body))

    def compressed(self, stream: int, body: bytes) -> bytes:
        """A DATA frame with a whole message that has the compressed flag."""
        return frame(FrameType.DATA, END_STREAM, stream, message(body, compressed=True))

    async def frame(self) -> Frame:
        """The next frame. Raises IncompleteReadError at the connection's end."""
        length_and_type, flags, stream = FRAME_HEADER.unpack(
            await self.reader.readexactly(FRAME_HEADER.size)
        )
        payload = await self.reader.readexactly(length_and_type >> 8)
        return Frame(length_and_type & 0xFF, flags, stream & MAX_WINDOW_SIZE, payload)

    async def next(self, *kinds: FrameType, stream: int | None = None) -> Frame:
        """The next frame of these types; skips others."""
        while True:
            found = await self.frame()
            if found.type in kinds and stream in (None, found.stream_id):
                return found

    def shrink_table(self, size: int) -> None:
        """Decodes headers with the announced HPACK table."""
        self._decoder.max_allowed_table_size = size

    def fields(self, received: Frame) -> dict[str, str]:
        """What a HEADERS frame says."""
        return {str(name): str(value) for name, value in self._decoder.decode(received.payload)}

    async def answer(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """All data of a response, and the fields of all header blocks."""
        body, said = bytearray(), dict[str, str]()
        while True:
            found = await self.next(FrameType.DATA, FrameType.HEADERS, stream=stream)
            if found.type == FrameType.DATA:
                body += found.payload
            else:
                said |= self.fields(found)
            if found.flags & END_STREAM:
                return bytes(body), said

    async def error(self) -> tuple[int, ErrorCode]:
        """Stream, or 0 for the connection, and code of the next error."""
        found = await self.next(FrameType.RST_STREAM, FrameType.GOAWAY)
        if found.type == FrameType.GOAWAY:
            return 0, ErrorCode(int.from_bytes(found.payload[4:8]))
        return found.stream_id, ErrorCode(int.from_bytes(found.payload))

    async def farewell(self) -> Frame:
        """Waits for the announcement that the connection ends, which refuses nothing yet; returns its PING."""
        goaway = await self.next(FrameType.GOAWAY)
        assert goaway.payload == MAX_WINDOW_SIZE.to_bytes(4) + ErrorCode.NO_ERROR.to_bytes(4)
        return await self.next(FrameType.PING)

    async def refuses(self, ping: Frame) -> int:
        """Answers the PING of a farewell; returns the last stream that is served."""
        self.send(frame(FrameType.PING, ACK, 0, ping.payload))
        goaway = await self.next(FrameType.GOAWAY)
        assert ErrorCode.parse(goaway.payload[4:8]) == ErrorCode.NO_ERROR
        return int.from_bytes(goaway.payload[:4])

    async def closed(self) -> bytes:
        """Waits for the end of the connection; returns the rest of the data."""
        return await self.reader.read()

    async def echoes(self, stream: int) -> None:
        """Checks that the server still works."""
        self.send(self.call(stream), self.data(stream, b"still here"))
        body, said = await self.answer(stream)
        assert (body, said["grpc-status"]) == (message(b"still here"), "0")


@asynccontextmanager
async def wired(
    example: Example,
    values: dict[Setting, int] | None = None,
    greet: bool = True,
    receive_bytes: int = 2**20,
) -> AsyncIterator[Wire]:
    """A connection, with preface and SETTINGS if `greet`; the system buffers about `receive_bytes` unread."""
    async with asyncio.timeout(60):
        connected = socket.socket()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connected.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connected, example.host_and_port)
        reader, writer = await asyncio.open_connection(sock=connected)
        wire = Wire(reader, writer)
        try:
            if greet:
                wire.send(PREFACE, settings(values or {}), frame(FrameType.SETTINGS, ACK, 0))
            yield wire
        finally:
            writer.close()
