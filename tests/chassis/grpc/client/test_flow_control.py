"""Flow control of the client, with scripted server frames."""

from __future__ import annotations

import asyncio

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
from chassis.grpc.server.wire import Wire, message
from trtmesh.chassis.grpc.client import connected
from trtmesh.chassis.grpc.client.call import WINDOW_SIZE
from trtmesh.chassis.http2.frames import (
    END_STREAM,
    ErrorCode,
    Frame,
    FrameType,
    Setting,
    frame,
    settings,
    window_update,
)


@pytest.mark.parametrize("peer", [settings({Setting.INITIAL_WINDOW_SIZE: 10})], indirect=True)
async def test_data_stays_within_the_window(peer: Peer) -> None:
    async with called(peer, "Join") as (_, wire, call):
        writing = asyncio.create_task(call.write(b"x" * 20))
        assert (await wire.next(FrameType.DATA)).payload == message(b"x" * 20)[:10]
        wire.send(frame(FrameType.PING, 0, 0, bytes(8)))
        await wire.next(FrameType.PING)
        assert not writing.done()
        wire.send(window_update(1, 100))
        assert (await wire.next(FrameType.DATA)).payload == message(b"x" * 20)[10:]
        await writing
        call.half_close()
        assert (await wire.next(FrameType.DATA)).flags == END_STREAM


@pytest.mark.parametrize("peer", [settings({Setting.INITIAL_WINDOW_SIZE: 10})], indirect=True)
async def test_write_waiting_for_the_window_raises_the_status(peer: Peer) -> None:
    async with called(peer, "Join") as (_, wire, call):
        writing = asyncio.create_task(call.write(b"x" * 20))
        await wire.next(FrameType.DATA)
        wire.send(headers(wire, 1, HEAD | {"grpc-status": "9", "grpc-message": "no"}, END_STREAM))
        with pytest.raises(grpc.aio.AioRpcError, match="no") as caught:
            await writing
        assert code_of(caught) is grpc.StatusCode.FAILED_PRECONDITION
        call.half_close()
        assert await wire.error() == (1, ErrorCode.NO_ERROR)
        wire.send(frame(FrameType.PING, 0, 0, bytes(8)))
        assert (await wire.frame()).type == FrameType.PING


@pytest.mark.parametrize("peer", [settings({Setting.INITIAL_WINDOW_SIZE: 10})], indirect=True)
async def test_response_may_precede_the_end_of_the_request(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        text = b"x" * 100
        asking = asyncio.create_task(connection.ask(method("Echo"), text, PATIENCE_SECONDS))
        await wire.next(FrameType.DATA, stream=1)
        wire.send(headers(wire, 1, HEAD), wire.data(1, b"early", 0))
        wire.send(headers(wire, 1, OK, END_STREAM))
        assert await asking == b"early"
        assert await wire.error() == (1, ErrorCode.NO_ERROR)


@pytest.mark.parametrize("peer", [settings({Setting.INITIAL_WINDOW_SIZE: 10})], indirect=True)
async def test_rest_of_a_cancelled_write_is_sent_first(peer: Peer) -> None:
    async with called(peer, "Join") as (_, wire, call):
        first = asyncio.create_task(call.write(b"a" * 20))
        body = (await wire.next(FrameType.DATA)).payload
        first.cancel()
        second = asyncio.create_task(call.write(b"b" * 20))
        wire.send(window_update(1, 1000))
        while len(body) < 50:
            body += (await wire.next(FrameType.DATA)).payload
        assert body == message(b"a" * 20) + message(b"b" * 20)
        await second


async def test_server_may_send_a_whole_window_ahead(peer: Peer) -> None:
    async with called(peer, "Many") as (_, wire, call):
        size = WINDOW_SIZE // 32 - len(message(b""))
        wire.send(headers(wire, 1, HEAD), *(wire.data(1, bytes(size), 0) for _ in range(32)))
        await answered(wire)
        wire.send(headers(wire, 1, OK, END_STREAM))
        assert [len(each) async for each in call] == [size] * 32


async def test_unread_call_gets_no_window_update(
    peer: Peer,
) -> None:
    async with called(peer, "Many") as (connection, wire, call):
        size = 100_000
        count = WINDOW_SIZE // 2 // size + 1
        wire.send(headers(wire, 1, HEAD), *(wire.data(1, bytes(size), 0) for _ in range(count)))
        for found in await answered(wire):
            assert (found.type, found.stream_id) != (FrameType.WINDOW_UPDATE, 1)
        # Other calls of the connection continue.
        await echo(connection, wire, 3)
        for _ in range(count):
            assert await call.read() == bytes(size)
        grant = await wire.next(FrameType.WINDOW_UPDATE, stream=1)
        assert int.from_bytes(grant.payload) == count * len(message(bytes(size)))


async def answered(wire: Wire) -> list[Frame]:
    """The client's frames until it has processed everything sent before."""
    wire.send(frame(FrameType.PING, 0, 0, bytes(8)))
    said = [await wire.frame()]
    while said[-1].type != FrameType.PING:
        said.append(await wire.frame())
    return said
