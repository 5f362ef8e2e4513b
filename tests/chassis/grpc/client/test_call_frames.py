"""The client's streams and calls, with scripted server frames."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

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
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.fair import turns
from trtmesh.chassis.grpc.client import connected
from trtmesh.chassis.http2.frames import (
    END_STREAM,
    ErrorCode,
    FrameType,
    frame,
    rst_stream,
    window_update,
)


async def test_call_sends_headers_message_and_end_stream(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        call = connection.open(method("Echo"), timeout_seconds=2.5)
        await call.write(b"abc")
        call.half_close()
        said = wire.fields(await wire.next(FrameType.HEADERS, stream=1))
        assert said[":path"] == "/example.Service/Echo"
        assert (said[":method"], said[":scheme"], said["te"]) == ("POST", "http", "trailers")
        assert (said["content-type"], said["grpc-timeout"]) == ("application/grpc", "2500m")
        assert said[":authority"] == peer.address
        assert (await wire.next(FrameType.DATA, stream=1)).payload == message(b"abc")
        last = await wire.next(FrameType.DATA, stream=1)
        assert (last.payload, last.flags) == (b"", END_STREAM)


ENDS_CALL: dict[str, tuple[Breach, grpc.StatusCode, str]] = {
    "REFUSED_STREAM": (
        rst_stream(1, ErrorCode.REFUSED_STREAM),
        grpc.StatusCode.UNAVAILABLE,
        "REFUSED_STREAM",
    ),
    "CANCEL": (
        rst_stream(1, ErrorCode.CANCEL),
        grpc.StatusCode.CANCELLED,
        "CANCEL",
    ),
    "ENHANCE_YOUR_CALM": (
        rst_stream(1, ErrorCode.ENHANCE_YOUR_CALM),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "ENHANCE_YOUR_CALM",
    ),
    "unknown error code": (
        frame(FrameType.RST_STREAM, 0, 1, b"\0\0\0\x63"),
        grpc.StatusCode.INTERNAL,
        "INTERNAL_ERROR",
    ),
    "DATA before HEADERS": (
        lambda wire: wire.data(1, b"x", 0),
        grpc.StatusCode.INTERNAL,
        "violated HTTP/2",
    ),
    "trailers without END_STREAM": (
        lambda wire: headers(wire, 1, HEAD) + headers(wire, 1, {"more": "x"}),
        grpc.StatusCode.INTERNAL,
        "violated HTTP/2",
    ),
    "1xx headers with END_STREAM": (
        lambda wire: headers(wire, 1, {":status": "103"}, END_STREAM),
        grpc.StatusCode.INTERNAL,
        "violated HTTP/2",
    ),
    "END_STREAM without trailers": (
        lambda wire: headers(wire, 1, HEAD) + frame(FrameType.DATA, END_STREAM, 1),
        grpc.StatusCode.INTERNAL,
        "without grpc-status",
    ),
    "trailers-only without grpc-status": (
        lambda wire: headers(wire, 1, HEAD, END_STREAM),
        grpc.StatusCode.INTERNAL,
        "without grpc-status",
    ),
    "trailers without grpc-status": (
        lambda wire: headers(wire, 1, HEAD) + headers(wire, 1, {"x": "y"}, END_STREAM),
        grpc.StatusCode.UNKNOWN,
        "grpc-status is 'none'",
    ),
    "grpc-status is not a number": (
        lambda wire: headers(wire, 1, HEAD | {"grpc-status": "²"}, END_STREAM),
        grpc.StatusCode.UNKNOWN,
        "grpc-status is",
    ),
    "unknown grpc-status": (
        lambda wire: headers(wire, 1, HEAD | {"grpc-status": "99"}, END_STREAM),
        grpc.StatusCode.UNKNOWN,
        "grpc-status is '99'",
    ),
    "HTTP status": (
        lambda wire: headers(wire, 1, {":status": "503", "content-type": "text/html"}),
        grpc.StatusCode.UNAVAILABLE,
        "HTTP status 503",
    ),
    "another content-type": (
        lambda wire: headers(wire, 1, {":status": "200", "content-type": "text/html"}),
        grpc.StatusCode.UNKNOWN,
        "content-type 'text/html'",
    ),
    "upper-case header name": (
        lambda wire: headers(wire, 1, HEAD | {"Upper": "x"}),
        grpc.StatusCode.INTERNAL,
        "violated HTTP/2",
    ),
    "incomplete message": (
        lambda wire: (
            headers(wire, 1, HEAD)
            + frame(FrameType.DATA, 0, 1, message(b"abc")[:-1])
            + headers(wire, 1, OK, END_STREAM)
        ),
        grpc.StatusCode.INTERNAL,
        "incomplete",
    ),
    "unknown grpc-encoding": (
        lambda wire: (
            headers(wire, 1, HEAD | {"grpc-encoding": "odd"})
            + frame(FrameType.DATA, 0, 1, message(b"abc", compressed=True))
        ),
        grpc.StatusCode.UNIMPLEMENTED,
        "'odd'",
    ),
    "WINDOW_UPDATE by 0": (
        window_update(1, 0),
        grpc.StatusCode.INTERNAL,
        "violated HTTP/2",
    ),
}


@pytest.mark.parametrize(("said", "status", "words"), ENDS_CALL.values(), ids=ENDS_CALL)
async def test_invalid_response_ends_only_its_call(
    peer: Peer, said: Breach, status: grpc.StatusCode, words: str
) -> None:
    async with called(peer, "Echo") as (connection, wire, call):
        await call.write(b"")
        await wire.next(FrameType.DATA, stream=1)
        frames = wire.made(said)
        wire.send(frames)
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await call.read()
        assert code_of(caught) is status
        if frames[3] != FrameType.RST_STREAM:
            # Without END_STREAM from the client, the stream would stay open.
            assert (await wire.error())[0] == 1
        await echo(connection, wire, 3)


@pytest.mark.parametrize(
    "end",
    [
        lambda wire: headers(wire, 1, HEAD | OK, END_STREAM),
        lambda _: rst_stream(1, ErrorCode.INTERNAL_ERROR),
        lambda wire: headers(wire, 1, HEAD) + frame(FrameType.DATA, END_STREAM, 1),
    ],
)
async def test_data_after_the_servers_end_is_a_stream_error(
    peer: Peer, end: Callable[[Wire], bytes]
) -> None:
    async with called(peer, "Echo") as (connection, wire, call):
        call.half_close()
        wire.send(end(wire), wire.data(1, b"late", 0))
        while (found := await wire.error()) == (1, ErrorCode.NO_ERROR):
            pass
        assert found == (1, ErrorCode.STREAM_CLOSED)
        await echo(connection, wire, 3)


async def test_messages_before_a_failure_are_read_first(peer: Peer) -> None:
    async with called(peer, "Echo") as (_, wire, call):
        wire.send(headers(wire, 1, {":status": "103"}), headers(wire, 1, HEAD))
        wire.send(wire.data(1, b"first", 0), wire.data(1, b"second", 0))
        wire.send(headers(wire, 1, {"grpc-status": "14", "grpc-message": "gone"}, END_STREAM))
        assert [await call.read(), await call.read()] == [b"first", b"second"]
        with pytest.raises(grpc.aio.AioRpcError, match="gone") as caught:
            await call.read()
        assert code_of(caught) is grpc.StatusCode.UNAVAILABLE


async def test_messages_of_a_read_are_passed_on_before_a_failure(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they come whole or in parts, and whether their reader waits already."""
    # A busy machine spends a slice on the first frames, and the others wait for the next one.
    monkeypatch.setattr(turns, "TURN_SECONDS", math.inf)
    monkeypatch.setattr(turns, "PARSE_SLICE_SECONDS", math.inf)
    async with called(peer, "Echo") as (connection, wire, call):
        received = list[bytes]()
        reading = asyncio.create_task(call.each(lambda message: received.append(bytes(message))))
        await asyncio.sleep(0)
        connection.data_received(headers(wire, 1, HEAD) + wire.data(1, b"0", 0))
        assert received == [b"0"]
        connection.data_received(wire.data(1, b"1", 0))
        assert received == [b"0", b"1"]
        parts = b"".join(wire.data(1, b"%d" % number, 0) for number in (2, 3, 4, 5))
        connection.data_received(parts[:30])
        failed = headers(wire, 1, {"grpc-status": "14", "grpc-message": "gone"}, END_STREAM)
        connection.data_received(parts[30:] + failed)
        with pytest.raises(grpc.aio.AioRpcError, match="gone"):
            await reading
        assert received == [b"%d" % number for number in range(6)]


async def test_ask_sends_its_timeout_and_cancels_after_it(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        asking = asyncio.create_task(connection.ask(method("Echo"), b"", 0.25))
        said = wire.fields(await wire.next(FrameType.HEADERS, stream=1))
        assert said["grpc-timeout"] == "250m"
        with pytest.raises(Unavailable, match="did not respond within"):
            await asking
        assert await wire.error() == (1, ErrorCode.CANCEL)


async def test_ask_refuses_a_second_message(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        asking = asyncio.create_task(connection.ask(method("Echo"), b"", PATIENCE_SECONDS))
        await wire.next(FrameType.HEADERS, stream=1)
        wire.send(headers(wire, 1, HEAD), wire.data(1, b"one", 0), wire.data(1, b"two", 0))
        with pytest.raises(Unavailable, match="exactly one message"):
            await asking
        assert await wire.error() == (1, ErrorCode.CANCEL)


async def test_write_after_half_close_is_refused(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        call = connection.open(method("Join"))
        call.half_close()
        call.half_close()
        with pytest.raises(grpc.aio.UsageError, match="half-closed"):
            await call.write(b"")
        wire = await peer.wire()
        assert (await wire.next(FrameType.DATA, FrameType.RST_STREAM)).flags == END_STREAM
        wire.send(frame(FrameType.PING, 0, 0, bytes(8)))
        assert (await wire.next(FrameType.PING, FrameType.DATA)).type == FrameType.PING


@pytest.mark.parametrize("message_first", [True, False])
async def test_cancelled_read_loses_no_message(peer: Peer, message_first: bool) -> None:
    async with called(peer, "Echo") as (connection, wire, call):
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        # In one pass of the event loop: the task must not run in between.
        if not message_first:
            reading.cancel()
        connection.data_received(headers(wire, 1, HEAD) + wire.data(1, b"kept", 0))
        if message_first:
            reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await call.read() == b"kept"
