"""The rules of HTTP/2, kept and broken by a server that sends its own frames."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from chassis.grpc_client.conftest import HEAD, PATIENCE_SECONDS, Peer, headers, method
from chassis.grpc_server.conftest import MOST_BYTES
from chassis.grpc_server.wire import Breach, Wire, message
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc_client import Call, Connection, connected
from trtmesh.chassis.grpc_wire import keepalive
from trtmesh.chassis.grpc_wire.frames import (
    END_HEADERS,
    END_STREAM,
    ErrorCode,
    Kind,
    Setting,
    frame,
    go_away,
    reset,
    settings,
    window_update,
)

OK = {"grpc-status": "0"}


def code_of(connection_or_call: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> grpc.StatusCode:
    return connection_or_call.value.code()


@asynccontextmanager
async def called(
    peer: Peer, name: str
) -> AsyncIterator[tuple[Connection, Wire, Call[bytes, bytes]]]:
    """A connection, the server's end of it, and a call whose headers have arrived there."""
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        call = connection.open(method(name))
        await wire.next(Kind.HEADERS, stream=1)
        yield connection, wire, call


async def echo(connection: Connection, wire: Wire, stream: int) -> None:
    """Checks that the connection is used."""
    asking = asyncio.create_task(connection.ask(method("Echo"), b"x", PATIENCE_SECONDS))
    await wire.next(Kind.DATA, stream=stream)
    wire.send(headers(wire, stream, HEAD), wire.data(stream, b"y", 0))
    wire.send(headers(wire, stream, OK, END_STREAM))
    assert await asking == b"y"


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


ENDS_CONNECTION: dict[str, tuple[Breach, ErrorCode]] = {
    "a frame that is too long": (
        frame(Kind.DATA, 0, 1, bytes(2**20 + 1)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "data of a stream that was never opened": (
        lambda wire: wire.data(3, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers of a stream that was never opened": (
        lambda wire: headers(wire, 3, HEAD),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers of an even stream": (
        lambda wire: headers(wire, 2, HEAD),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a promise": (
        frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes(4)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a farewell that is cut off": (
        frame(Kind.GOAWAY, 0, 0, bytes(7)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "headers that cannot be read": (
        frame(Kind.HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a header block that is interrupted": (
        frame(Kind.HEADERS, 0, 1) + frame(Kind.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that grows by nothing": (
        window_update(0, 0),
        ErrorCode.PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize(("said", "code"), ENDS_CONNECTION.values(), ids=ENDS_CONNECTION)
async def test_a_server_that_breaks_a_rule_of_connections(
    peer: Peer, said: Breach, code: ErrorCode
) -> None:
    async with called(peer, "Wait") as (connection, wire, call):
        await call.write(b"")
        await wire.next(Kind.DATA, stream=1)
        wire.send(wire.made(said))
        with pytest.raises(grpc.aio.AioRpcError, match="broke a rule of HTTP/2") as caught:
            await call.read()
        assert code_of(caught) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Unavailable, match="broke a rule"):
            connection.open(method("Echo"))
        assert await wire.error() == (0, code)


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


async def test_a_connection_that_ends_amid_a_message(peer: Peer) -> None:
    async with called(peer, "Echo") as (_, wire, call):
        wire.send(headers(wire, 1, HEAD), frame(Kind.DATA, 0, 1, message(b"abc")[:-1]))
        peer.closed.set()
        with pytest.raises(grpc.aio.AioRpcError, match="closed") as caught:
            await call.read()
        assert code_of(caught) is grpc.StatusCode.UNAVAILABLE


async def test_a_farewell_ends_what_it_says_and_nothing_else(peer: Peer) -> None:
    async with called(peer, "Echo") as (connection, wire, first):
        second = connection.open(method("Echo"))
        await wire.next(Kind.HEADERS, stream=3)
        wire.send(go_away(1, ErrorCode.NO_ERROR, "it stops"))
        with pytest.raises(grpc.aio.AioRpcError, match="it stops") as caught:
            await second.read()
        assert code_of(caught) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Unavailable, match="it stops"):
            connection.open(method("Echo"))
        wire.send(go_away(1, ErrorCode.ENHANCE_YOUR_CALM, "too many pings"))
        wire.send(headers(wire, 1, HEAD), wire.data(1, b"last", 0))
        wire.send(headers(wire, 1, OK, END_STREAM))
        assert [await first.read(), await first.read()] == [b"last", None]


async def test_who_is_cut_off_behind_a_farewell_is_told_its_reason(peer: Peer) -> None:
    async with called(peer, "Wait") as (_, wire, call):
        wire.send(go_away(1, ErrorCode.ENHANCE_YOUR_CALM, "too many pings"))
        peer.closed.set()
        with pytest.raises(grpc.aio.AioRpcError, match="ENHANCE_YOUR_CALM: too many pings"):
            await call.read()


@pytest.mark.parametrize("peer", [settings({Setting.MAX_CONCURRENT_STREAMS: 1})], indirect=True)
async def test_no_more_calls_than_the_server_takes(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        await echo(connection, wire, 1)
        call = connection.open(method("Wait"))
        with pytest.raises(Unavailable, match="1 calls at once"):
            connection.open(method("Wait"))
        call.cancel()
        assert await wire.error() == (3, ErrorCode.CANCEL)
        await echo(connection, wire, 5)


@pytest.mark.parametrize("peer", [settings({Setting.INITIAL_WINDOW_SIZE: 10})], indirect=True)
async def test_no_more_is_sent_than_the_windows_take(peer: Peer) -> None:
    async with called(peer, "Join") as (_, wire, call):
        writing = asyncio.create_task(call.write(b"x" * 20))
        assert (await wire.next(Kind.DATA)).payload == message(b"x" * 20)[:10]
        wire.send(frame(Kind.PING, 0, 0, bytes(8)))
        await wire.next(Kind.PING)
        assert not writing.done()
        wire.send(window_update(1, 100))
        assert (await wire.next(Kind.DATA)).payload == message(b"x" * 20)[10:]
        await writing
        call.half_close()
        assert (await wire.next(Kind.DATA)).flags == END_STREAM


@pytest.mark.parametrize("peer", [settings({Setting.INITIAL_WINDOW_SIZE: 10})], indirect=True)
async def test_a_write_that_waits_for_a_window_is_told_the_end(peer: Peer) -> None:
    async with called(peer, "Join") as (_, wire, call):
        writing = asyncio.create_task(call.write(b"x" * 20))
        await wire.next(Kind.DATA)
        wire.send(headers(wire, 1, HEAD | {"grpc-status": "9", "grpc-message": "no"}, END_STREAM))
        with pytest.raises(grpc.aio.AioRpcError, match="no") as caught:
            await writing
        assert code_of(caught) is grpc.StatusCode.FAILED_PRECONDITION
        call.half_close()
        assert await wire.error() == (1, ErrorCode.NO_ERROR)
        wire.send(frame(Kind.PING, 0, 0, bytes(8)))
        assert (await wire.frame()).kind == Kind.PING


async def test_a_silent_server_is_given_up(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(keepalive, "ANSWER_SECONDS", 0.05)
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        call = connection.open(method("Wait"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(grpc.aio.AioRpcError, match="answered nothing"):
                await call.read()


@pytest.mark.parametrize("seed", range(30))
async def test_nonsense_ends_in_an_error(peer: Peer, seed: int) -> None:
    """Whatever a server sends, who reads is told an end, and no defect shows."""
    defects: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: defects.append(context))
    draw = random.Random(seed)
    async with connected(peer.address, 2**20, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        calls = [connection.open(method("Echo")) for _ in range(20)]
        await wire.next(Kind.HEADERS, stream=39)
        for _ in range(200):
            wire.send(_drawn(draw, wire))
        peer.closed.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            ends = await asyncio.gather(*map(_read_all, calls), return_exceptions=True)
    assert all(end is None or isinstance(end, grpc.aio.AioRpcError) for end in ends)
    assert any(end is not None for end in ends)
    assert defects == []


def _drawn(draw: random.Random, wire: Wire) -> bytes:
    """A frame that is mostly right."""
    stream = draw.randrange(1, 40, 2)
    whole, size = message(draw.randbytes(8)), draw.randrange(14)
    fields = draw.choice(
        (HEAD, OK, HEAD | {"grpc-status": "5"}, {"odd-bin": "%"}, {":status": "404"})
    )
    frames = (
        headers(wire, stream, HEAD),
        headers(wire, stream, fields, draw.choice((0, END_STREAM))),
        frame(Kind.DATA, draw.choice((0, 0, 0, END_STREAM)), stream, whole),
        frame(Kind.DATA, 0, stream, whole[:size]),
        reset(stream, draw.choice(list(ErrorCode))),
        window_update(draw.choice((0, stream)), draw.randrange(1, 2**20)),
        settings({Setting.INITIAL_WINDOW_SIZE: draw.randrange(2**17)}),
        frame(Kind.PING, 0, 0, draw.randbytes(8)),
        frame(draw.randrange(10, 256), draw.randrange(256), stream, draw.randbytes(size)),
    )
    if draw.random() < 0.002:
        return draw.randbytes(30)
    return draw.choice(frames)


async def _read_all(call: Call[bytes, bytes]) -> None:
    async for _ in call:
        pass


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


@pytest.mark.parametrize("peer", [settings({Setting.INITIAL_WINDOW_SIZE: 10})], indirect=True)
async def test_an_answer_before_the_whole_question(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        wire = await peer.wire()
        text = b"x" * 100
        asking = asyncio.create_task(connection.ask(method("Echo"), text, PATIENCE_SECONDS))
        await wire.next(Kind.DATA, stream=1)
        wire.send(headers(wire, 1, HEAD), wire.data(1, b"early", 0))
        wire.send(headers(wire, 1, OK, END_STREAM))
        assert await asking == b"early"
        assert await wire.error() == (1, ErrorCode.NO_ERROR)


@pytest.mark.parametrize("peer", [settings({Setting.INITIAL_WINDOW_SIZE: 10})], indirect=True)
async def test_what_a_cancelled_write_left_is_sent_first(peer: Peer) -> None:
    async with called(peer, "Join") as (_, wire, call):
        first = asyncio.create_task(call.write(b"a" * 20))
        body = (await wire.next(Kind.DATA)).payload
        first.cancel()
        second = asyncio.create_task(call.write(b"b" * 20))
        wire.send(window_update(1, 1000))
        while len(body) < 50:
            body += (await wire.next(Kind.DATA)).payload
        assert body == message(b"a" * 20) + message(b"b" * 20)
        await second


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


async def test_a_link_carries_more_than_the_usual_window_in_a_round_trip(peer: Peer) -> None:
    async with called(peer, "Many") as (_, wire, call):
        wire.send(headers(wire, 1, HEAD), *(wire.data(1, bytes(100_000), 0) for _ in range(20)))
        wire.send(headers(wire, 1, OK, END_STREAM))
        assert [len(each) async for each in call] == [100_000] * 20
