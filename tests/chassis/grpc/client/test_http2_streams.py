"""Calls by the rules of HTTP/2, kept and broken by a server that sends its own frames."""

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
from chassis.grpc.server.wire import Breach, message
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc.client import connected
from trtmesh.chassis.http2.frames import (
    END_STREAM,
    ErrorCode,
    Kind,
    frame,
    reset,
    window_update,
)


async def test_what_a_call_says(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        call = connection.open(method("Echo"), deadline_seconds=2.5)
        await call.write(b"abc")
        call.half_close()
        said = wire.fields(await wire.next(Kind.HEADERS, stream=1))
        assert said[":path"] == "/example.Service/Echo"
        assert (said[":method"], said[":scheme"], said["te"]) == ("POST", "http", "trailers")
        assert (said["content-type"], said["grpc-timeout"]) == ("application/grpc", "2500m")
        assert said[":authority"] == peer.address
        assert (await wire.next(Kind.DATA, stream=1)).payload == message(b"abc")
        last = await wire.next(Kind.DATA, stream=1)
        assert (last.payload, last.flags) == (b"", END_STREAM)


ENDS_CALL: dict[str, tuple[Breach, grpc.StatusCode, str]] = {
    "a refusal": (
        reset(1, ErrorCode.REFUSED_STREAM),
        grpc.StatusCode.UNAVAILABLE,
        "REFUSED_STREAM",
    ),
    "a cancellation": (
        reset(1, ErrorCode.CANCEL),
        grpc.StatusCode.CANCELLED,
        "CANCEL",
    ),
    "too much": (
        reset(1, ErrorCode.ENHANCE_YOUR_CALM),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "ENHANCE_YOUR_CALM",
    ),
    "an unknown reset": (
        frame(Kind.RST_STREAM, 0, 1, b"\0\0\0\x63"),
        grpc.StatusCode.INTERNAL,
        "INTERNAL_ERROR",
    ),
    "data before headers": (
        lambda wire: wire.data(1, b"x", 0),
        grpc.StatusCode.INTERNAL,
        "broke a rule",
    ),
    "headers behind data": (
        lambda wire: headers(wire, 1, HEAD) + headers(wire, 1, {"more": "x"}),
        grpc.StatusCode.INTERNAL,
        "broke a rule",
    ),
    "an announcement that ends": (
        lambda wire: headers(wire, 1, {":status": "103"}, END_STREAM),
        grpc.StatusCode.INTERNAL,
        "broke a rule",
    ),
    "an end without a status": (
        lambda wire: headers(wire, 1, HEAD) + frame(Kind.DATA, END_STREAM, 1),
        grpc.StatusCode.INTERNAL,
        "without a status",
    ),
    "a head that is the end, without a status": (
        lambda wire: headers(wire, 1, HEAD, END_STREAM),
        grpc.StatusCode.INTERNAL,
        "without a status",
    ),
    "trailers without a status": (
        lambda wire: headers(wire, 1, HEAD) + headers(wire, 1, {"x": "y"}, END_STREAM),
        grpc.StatusCode.UNKNOWN,
        "grpc-status is 'none'",
    ),
    "a status that is none": (
        lambda wire: headers(wire, 1, HEAD | {"grpc-status": "²"}, END_STREAM),
        grpc.StatusCode.UNKNOWN,
        "grpc-status is",
    ),
    "a status that is not known": (
        lambda wire: headers(wire, 1, HEAD | {"grpc-status": "99"}, END_STREAM),
        grpc.StatusCode.UNKNOWN,
        "grpc-status is '99'",
    ),
    "an answer of HTTP": (
        lambda wire: headers(wire, 1, {":status": "503", "content-type": "text/html"}),
        grpc.StatusCode.UNAVAILABLE,
        "HTTP status 503",
    ),
    "another content": (
        lambda wire: headers(wire, 1, {":status": "200", "content-type": "text/html"}),
        grpc.StatusCode.UNKNOWN,
        "content-type 'text/html'",
    ),
    "a name that is no header's": (
        lambda wire: headers(wire, 1, HEAD | {"Upper": "x"}),
        grpc.StatusCode.INTERNAL,
        "broke a rule",
    ),
    "a message that is cut off": (
        lambda wire: (
            headers(wire, 1, HEAD)
            + frame(Kind.DATA, 0, 1, message(b"abc")[:-1])
            + headers(wire, 1, OK, END_STREAM)
        ),
        grpc.StatusCode.INTERNAL,
        "cut off",
    ),
    "a message of an unknown compression": (
        lambda wire: (
            headers(wire, 1, HEAD | {"grpc-encoding": "odd"})
            + frame(Kind.DATA, 0, 1, message(b"abc", compressed=True))
        ),
        grpc.StatusCode.UNIMPLEMENTED,
        "'odd'",
    ),
    "a window that grows by nothing": (
        window_update(1, 0),
        grpc.StatusCode.INTERNAL,
        "broke a rule",
    ),
}


@pytest.mark.parametrize(("said", "status", "words"), ENDS_CALL.values(), ids=ENDS_CALL)
async def test_what_ends_one_call(
    peer: Peer, said: Breach, status: grpc.StatusCode, words: str
) -> None:
    async with called(peer, "Echo") as (connection, wire, call):
        await call.write(b"")
        await wire.next(Kind.DATA, stream=1)
        frames = wire.made(said)
        wire.send(frames)
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await call.read()
        assert code_of(caught) is status
        if frames[3] != Kind.RST_STREAM:
            # Who has not half-closed must say that nothing follows, or the stream counts for ever.
            assert (await wire.error())[0] == 1
        await echo(connection, wire, 3)


async def test_messages_before_an_error_are_read_first(peer: Peer) -> None:
    async with called(peer, "Echo") as (_, wire, call):
        wire.send(headers(wire, 1, {":status": "103"}), headers(wire, 1, HEAD))
        wire.send(wire.data(1, b"first", 0), wire.data(1, b"second", 0))
        wire.send(headers(wire, 1, {"grpc-status": "14", "grpc-message": "gone"}, END_STREAM))
        assert [await call.read(), await call.read()] == [b"first", b"second"]
        with pytest.raises(grpc.aio.AioRpcError, match="gone") as caught:
            await call.read()
        assert code_of(caught) is grpc.StatusCode.UNAVAILABLE


async def test_a_question_is_told_with_its_deadline_and_taken_back(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        asking = asyncio.create_task(connection.ask(method("Echo"), b"", 0.25))
        said = wire.fields(await wire.next(Kind.HEADERS, stream=1))
        assert said["grpc-timeout"] == "250m"
        with pytest.raises(Unavailable, match="not answered within"):
            await asking
        assert await wire.error() == (1, ErrorCode.CANCEL)


async def test_a_question_has_one_answer(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        asking = asyncio.create_task(connection.ask(method("Echo"), b"", PATIENCE_SECONDS))
        await wire.next(Kind.HEADERS, stream=1)
        wire.send(headers(wire, 1, HEAD), wire.data(1, b"one", 0), wire.data(1, b"two", 0))
        with pytest.raises(Unavailable, match="one message"):
            await asking
        assert await wire.error() == (1, ErrorCode.CANCEL)


async def test_who_closed_for_writing_writes_no_more(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        call = connection.open(method("Join"))
        call.half_close()
        call.half_close()
        with pytest.raises(grpc.aio.UsageError, match="closed for writing"):
            await call.write(b"")
        wire = await peer.wire()
        assert (await wire.next(Kind.DATA, Kind.RST_STREAM)).flags == END_STREAM
        wire.send(frame(Kind.PING, 0, 0, bytes(8)))
        assert (await wire.next(Kind.PING, Kind.DATA)).kind == Kind.PING


@pytest.mark.parametrize("message_first", [True, False])
async def test_a_read_that_is_cancelled_as_a_message_comes_loses_nothing(
    peer: Peer, message_first: bool
) -> None:
    async with called(peer, "Echo") as (connection, wire, call):
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        # In one pass of the event loop, so that the task has not run between the two.
        if not message_first:
            reading.cancel()
        connection.data_received(headers(wire, 1, HEAD) + wire.data(1, b"kept", 0))
        if message_first:
            reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await call.read() == b"kept"
