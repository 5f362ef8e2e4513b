"""A server with scripted frames, valid or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import grpc
import pytest
from chassis.grpc.server.conftest import MOST_BYTES
from chassis.grpc.server.wire import Wire
from trtmesh.chassis.grpc.client import ClientCall, ClientConnection, Method, connected
from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    PREFACE,
    FrameType,
    Setting,
    frame,
    parse_settings,
)

PATIENCE_SECONDS = 30.0

HEAD = {":status": "200", "content-type": "application/grpc"}
OK = {"grpc-status": "0"}


def method(name: str) -> Method[bytes, bytes]:
    """A method of the example, with plain bytes as messages."""
    return Method(f"/example.Service/{name}", bytes, bytes)


class Peer:
    """A server of one connection; the test writes the frames."""

    def __init__(self, greeting: bytes) -> None:
        self._greeting = greeting
        self._accepted: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
        self.address = ""
        self.closed = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._greeting)
        self._accepted.set_result(Wire(reader, writer))
        await self.closed.wait()
        writer.close()

    async def wire(self) -> Wire:
        """The connection after the client's preface and SETTINGS."""
        wire = await self._accepted
        assert await wire.reader.readexactly(len(PREFACE)) == PREFACE
        said = dict(parse_settings(await wire.next(FrameType.SETTINGS)))
        assert said[Setting.ENABLE_PUSH] == 0
        return wire


@asynccontextmanager
async def called(
    peer: Peer, name: str
) -> AsyncIterator[tuple[ClientConnection, Wire, ClientCall[bytes, bytes]]]:
    """A connection, its server side, and a call with received headers."""
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        call = connection.open(method(name))
        await wire.next(FrameType.HEADERS, stream=1)
        yield connection, wire, call


def headers(wire: Wire, stream: int, fields: Mapping[str, str], flags: int = 0) -> bytes:
    """A HEADERS frame of a response."""
    block = bytes(wire.encoder.encode(list(fields.items())))
    return frame(FrameType.HEADERS, END_HEADERS | flags, stream, block)


async def echo(connection: ClientConnection, wire: Wire, stream: int) -> None:
    """Checks that the connection still works."""
    asking = asyncio.create_task(connection.ask(method("Echo"), b"x", PATIENCE_SECONDS))
    await wire.next(FrameType.DATA, stream=stream)
    wire.send(headers(wire, stream, HEAD), wire.data(stream, b"y", 0))
    wire.send(headers(wire, stream, OK, END_STREAM))
    assert await asking == b"y"


def code_of(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> grpc.StatusCode:
    return caught.value.code()
