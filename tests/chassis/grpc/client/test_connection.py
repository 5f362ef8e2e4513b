"""The client's connection, with scripted server frames."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import grpc
import pytest
from chassis.grpc.client.scripted_server import (
    HEAD,
    OK,
    PATIENCE_SECONDS,
    Peer,
    called,
    code_of,
    echo,
    headers,
    method,
)
from chassis.grpc.server.conftest import MOST_BYTES
from chassis.grpc.server.wire import Breach, Wire, message
from chassis.withheld_turns import WithheldTurns
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc.client import ClientCall, connected
from trtmesh.chassis.grpc.client.connection import SHORT_BYTES
from trtmesh.chassis.http2 import connection as http2_connection
from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    ErrorCode,
    FrameType,
    Setting,
    frame,
    goaway,
    rst_stream,
    settings,
    window_update,
)

ENDS_CONNECTION: dict[str, tuple[Breach, ErrorCode]] = {
    "frame exceeds MAX_FRAME_SIZE": (
        frame(FrameType.DATA, 0, 1, bytes(2**20 + 1)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "DATA on an idle stream": (
        lambda wire: wire.data(3, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS on an idle stream": (
        lambda wire: headers(wire, 3, HEAD),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS on an even stream": (
        lambda wire: headers(wire, 2, HEAD),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "PUSH_PROMISE": (
        frame(FrameType.PUSH_PROMISE, END_HEADERS, 1, bytes(4)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "incomplete GOAWAY": (
        frame(FrameType.GOAWAY, 0, 0, bytes(7)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "invalid header block": (
        frame(FrameType.HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "interrupted header block": (
        frame(FrameType.HEADERS, 0, 1) + frame(FrameType.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "WINDOW_UPDATE by 0": (
        window_update(0, 0),
        ErrorCode.PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize(("said", "code"), ENDS_CONNECTION.values(), ids=ENDS_CONNECTION)
async def test_connection_error_ends_every_call(peer: Peer, said: Breach, code: ErrorCode) -> None:
    async with called(peer, "Wait") as (connection, wire, call):
        await call.write(b"")
        await wire.next(FrameType.DATA, stream=1)
        wire.send(wire.made(said))
        with pytest.raises(grpc.aio.AioRpcError, match="violated HTTP/2") as caught:
            await call.read()
        assert code_of(caught) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Unavailable, match="violated HTTP/2"):
            connection.open(method("Echo"))
        assert await wire.error() == (0, code)


async def test_connection_lost_inside_a_message(peer: Peer) -> None:
    async with called(peer, "Echo") as (_, wire, call):
        wire.send(headers(wire, 1, HEAD), frame(FrameType.DATA, 0, 1, message(b"abc")[:-1]))
        peer.closed.set()
        with pytest.raises(grpc.aio.AioRpcError, match="closed") as caught:
            await call.read()
        assert code_of(caught) is grpc.StatusCode.UNAVAILABLE


async def test_goaway_ends_only_calls_after_its_last_stream(peer: Peer) -> None:
    async with called(peer, "Echo") as (connection, wire, first):
        second = connection.open(method("Echo"))
        await wire.next(FrameType.HEADERS, stream=3)
        wire.send(goaway(1, ErrorCode.NO_ERROR, "it stops"))
        with pytest.raises(grpc.aio.AioRpcError, match="it stops") as caught:
            await second.read()
        assert code_of(caught) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Unavailable, match="it stops"):
            connection.open(method("Echo"))
        wire.send(goaway(1, ErrorCode.ENHANCE_YOUR_CALM, "too many pings"))
        wire.send(headers(wire, 1, HEAD), wire.data(1, b"last", 0))
        wire.send(headers(wire, 1, OK, END_STREAM))
        assert [await first.read(), await first.read()] == [b"last", None]


async def test_connection_lost_after_goaway_raises_its_reason(peer: Peer) -> None:
    async with called(peer, "Wait") as (_, wire, call):
        wire.send(goaway(1, ErrorCode.ENHANCE_YOUR_CALM, "too many pings"))
        peer.closed.set()
        with pytest.raises(grpc.aio.AioRpcError, match="ENHANCE_YOUR_CALM: too many pings"):
            await call.read()


@pytest.mark.parametrize("peer", [settings({Setting.MAX_CONCURRENT_STREAMS: 1})], indirect=True)
async def test_max_concurrent_streams_is_kept(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        await echo(connection, wire, 1)
        call = connection.open(method("Wait"))
        with pytest.raises(Unavailable, match="at most 1 concurrent"):
            connection.open(method("Wait"))
        call.cancel()
        assert await wire.error() == (3, ErrorCode.CANCEL)
        await echo(connection, wire, 5)


async def test_a_connection_takes_the_turns_that_it_shares(peer: Peer) -> None:
    turns = WithheldTurns()

    async def connect() -> None:
        async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS, turns=turns):
            pass

    connecting = asyncio.create_task(connect())
    await peer.wire()
    while not turns.asked:  # noqa: ASYNC110 - a list sets no event
        await asyncio.sleep(0)
    assert not connecting.done()
    turns.give()
    await connecting


@pytest.mark.parametrize(("size", "waits"), [(100, False), (SHORT_BYTES, True)])
async def test_a_short_message_alone_takes_no_turn(peer: Peer, *, size: int, waits: bool) -> None:
    turns = WithheldTurns()

    async def give() -> None:
        while True:
            turns.give()
            await asyncio.sleep(0)

    giving = asyncio.create_task(give())
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS, turns=turns) as connection:
        wire = await peer.wire()
        call = connection.open(method("Wait"))
        await wire.next(FrameType.HEADERS, stream=1)
        wire.send(headers(wire, 1, HEAD))
        while not call.headers_received:  # noqa: ASYNC110 - a flag sets no event
            await asyncio.sleep(0)
        giving.cancel()
        reading = asyncio.create_task(call.read())
        wire.send(wire.data(1, bytes(size), 0))
        while not (turns.asked or reading.done()):  # noqa: ASYNC110 - a list sets no event
            await asyncio.sleep(0)
        waited = bool(turns.asked)
        turns.give()
        assert await reading == bytes(size)
        assert waited == waits


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
async def test_socket_has_a_tcp_user_timeout(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        endpoint = connection._transport.get_extra_info("socket")
        milliseconds = endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert milliseconds == http2_connection.PAUSE_SECONDS * 1000


async def test_keepalive_aborts_a_silent_server(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(http2_connection, "PING_TIMEOUT_SECONDS", 0.05)
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        call = connection.open(method("Wait"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(grpc.aio.AioRpcError, match="was silent"):
                await call.read()


@pytest.mark.parametrize("seed", range(30))
async def test_random_frames_end_in_an_error(peer: Peer, seed: int) -> None:
    """Every call ends, with OK or a status, and nothing unexpected is raised."""
    defects: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: defects.append(context))
    draw = random.Random(seed)
    async with connected(peer.address, 2**20, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        calls = [connection.open(method("Echo")) for _ in range(20)]
        await wire.next(FrameType.HEADERS, stream=39)
        for _ in range(200):
            wire.send(_drawn(draw, wire))
        peer.closed.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            ends = await asyncio.gather(*map(_read_all, calls), return_exceptions=True)
    assert all(end is None or isinstance(end, grpc.aio.AioRpcError) for end in ends)
    assert any(end is not None for end in ends)
    assert defects == []


def _drawn(draw: random.Random, wire: Wire) -> bytes:
    """A mostly valid frame."""
    stream = draw.randrange(1, 40, 2)
    whole, size = message(draw.randbytes(8)), draw.randrange(14)
    fields = draw.choice(
        (HEAD, OK, HEAD | {"grpc-status": "5"}, {"odd-bin": "%"}, {":status": "404"})
    )
    frames = (
        headers(wire, stream, HEAD),
        headers(wire, stream, fields, draw.choice((0, END_STREAM))),
        frame(FrameType.DATA, draw.choice((0, 0, 0, END_STREAM)), stream, whole),
        frame(FrameType.DATA, 0, stream, whole[:size]),
        rst_stream(stream, draw.choice(list(ErrorCode))),
        window_update(draw.choice((0, stream)), draw.randrange(1, 2**20)),
        settings({Setting.INITIAL_WINDOW_SIZE: draw.randrange(2**17)}),
        frame(FrameType.PING, 0, 0, draw.randbytes(8)),
        frame(draw.randrange(10, 256), draw.randrange(256), stream, draw.randbytes(size)),
    )
    if draw.random() < 0.002:
        return draw.randbytes(30)
    return draw.choice(frames)


async def _read_all(call: ClientCall[bytes, bytes]) -> None:
    async for _ in call:
        pass
