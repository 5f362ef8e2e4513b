"""The server's connections, with scripted client frames."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import aiohttp
import grpc
import pytest
from chassis.grpc.server.conftest import Example
from chassis.grpc.server.wire import OPEN, Breach, Wire, message, raw_settings, wired
from trtmesh.chassis.fair import limits, turns
from trtmesh.chassis.fair.limits import Rate
from trtmesh.chassis.grpc.server import connection as server_connection
from trtmesh.chassis.grpc.server.connection import ServerConnection
from trtmesh.chassis.http2 import connection as http2_connection
from trtmesh.chassis.http2 import rates
from trtmesh.chassis.http2.connection import MAX_CLOSED_STREAMS
from trtmesh.chassis.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    MAX_WINDOW_SIZE,
    PADDED,
    PREFACE,
    PRIORITY,
    ErrorCode,
    FrameType,
    Setting,
    frame,
    rst_stream,
    settings,
    window_update,
)
from trtmesh.chassis.http2.writer import MAX_PASS_BYTES

ENDS_CONNECTION: dict[str, tuple[Breach, ErrorCode]] = {
    "frame exceeds MAX_FRAME_SIZE": (
        frame(FrameType.DATA, 0, OPEN, bytes(2**20 + 1)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "DATA on an idle stream": (
        lambda wire: wire.data(99, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "DATA on stream 0": (lambda wire: wire.data(0, b""), ErrorCode.PROTOCOL_ERROR),
    "even stream identifier": (lambda wire: wire.call(4), ErrorCode.PROTOCOL_ERROR),
    "HEADERS on stream 0": (lambda wire: wire.call(0), ErrorCode.PROTOCOL_ERROR),
    "padding as long as the payload": (
        frame(FrameType.DATA, PADDED, OPEN, b"\x04abc"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "PADDED without a length": (
        frame(FrameType.DATA, PADDED, OPEN),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "incomplete priority fields": (
        frame(FrameType.HEADERS, END_HEADERS | PRIORITY, 3, b"\0\0\0"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "invalid header block": (
        frame(FrameType.HEADERS, END_HEADERS, 3, b"\xff\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "header list bomb": (
        frame(
            FrameType.HEADERS, END_HEADERS, 3, b"\x40\x01a\x7f\x81\x1f" + b"x" * 4096 + b"\xbe" * 60
        ),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "CONTINUATION without HEADERS": (
        frame(FrameType.CONTINUATION, END_HEADERS, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION of another stream": (
        frame(FrameType.HEADERS, 0, 3) + frame(FrameType.CONTINUATION, END_HEADERS, 5),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "interrupted header block": (
        frame(FrameType.HEADERS, 0, 3) + frame(FrameType.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "header block too large": (
        frame(FrameType.HEADERS, END_HEADERS, 3, bytes(2**16 + 1)),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "SETTINGS flood": (
        raw_settings((Setting.INITIAL_WINDOW_SIZE, 1)) * 1000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "large SETTINGS": (
        raw_settings(*[(99, 1)] * 101),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "PING flood": (
        frame(FrameType.PING, 0, 0, bytes(8)) * 2000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "PRIORITY flood": (
        frame(FrameType.PRIORITY, 0, OPEN, bytes(5)) * 4000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "GOAWAY flood": (
        frame(FrameType.GOAWAY, 0, 0, bytes(8)) * 100,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "flood of unknown frames": (
        frame(99, 0, 0) * 3000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "empty DATA flood": (
        lambda wire: wire.call(3, "Chat") + frame(FrameType.DATA, 0, 3) * 3000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "padded DATA flood": (
        lambda wire: wire.call(3, "Chat") + frame(FrameType.DATA, PADDED, 3, b"\1\0") * 3000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "WINDOW_UPDATE flood": (
        window_update(0, 1) * 4000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "WINDOW_UPDATE flood of a stream": (
        lambda wire: wire.call(3, "Chat") + window_update(3, 1) * 4000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "flood of frames on closed streams": (
        lambda wire: (
            wire.call(3, "Chat") + rst_stream(3, ErrorCode.CANCEL) + window_update(3, 1) * 30_000
        ),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "flood of stream errors": (
        lambda wire: b"".join(
            wire.call(s, "Chat") + window_update(s, 0) for s in range(3, 4003, 2)
        ),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "rapid reset": (
        lambda wire: b"".join(
            wire.call(s, "Chat") + rst_stream(s, ErrorCode.CANCEL) for s in range(3, 12003, 2)
        ),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "large unknown frame": (
        frame(99, 0, 0, bytes(2**15 + 1))[:9],
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "updates of the table's size": (
        frame(FrameType.HEADERS, END_HEADERS, 3, b"\x20" * 3),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "CONTINUATION flood": (
        frame(FrameType.HEADERS, 0, 3) + frame(FrameType.CONTINUATION, 0, 3) * 8000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "PUSH_PROMISE": (
        frame(FrameType.PUSH_PROMISE, END_HEADERS, OPEN, bytes(4)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "PING of the wrong length": (
        frame(FrameType.PING, 0, 0, bytes(7)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "RST_STREAM of the wrong length": (
        frame(FrameType.RST_STREAM, 0, OPEN, bytes(3)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "RST_STREAM on an idle stream": (
        rst_stream(9, ErrorCode.CANCEL),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "SETTINGS of the wrong length": (
        frame(FrameType.SETTINGS, 0, 0, bytes(5)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "SETTINGS on a stream": (
        frame(FrameType.SETTINGS, 0, OPEN),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "SETTINGS ACK with a payload": (
        frame(FrameType.SETTINGS, ACK, 0, bytes(6)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "PING on a stream": (
        frame(FrameType.PING, 0, OPEN, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "GOAWAY on a stream": (
        frame(FrameType.GOAWAY, 0, OPEN, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "PRIORITY on stream 0": (
        frame(FrameType.PRIORITY, 0, 0, bytes(5)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "PRIORITY of the wrong length": (
        frame(FrameType.PRIORITY, 0, OPEN, bytes(4)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "HEADERS on a stream that was passed over": (
        lambda wire: wire.call(5, "None", END_STREAM) + wire.call(3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS after END_STREAM of a refused call": (
        lambda wire: wire.call(3, "None", END_STREAM) + wire.call(3, flags=END_STREAM),
        ErrorCode.STREAM_CLOSED,
    ),
    "HEADERS after END_STREAM of a malformed call": (
        lambda wire: (
            wire.call(3, flags=END_STREAM, changes={":path": ""}) + wire.call(3, flags=END_STREAM)
        ),
        ErrorCode.STREAM_CLOSED,
    ),
    "HEADERS after RST_STREAM": (
        lambda wire: wire.call(3, "Wait") + rst_stream(3, ErrorCode.CANCEL) + wire.call(3),
        ErrorCode.STREAM_CLOSED,
    ),
    "INITIAL_WINDOW_SIZE too large": (
        raw_settings((Setting.INITIAL_WINDOW_SIZE, 2**31)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "INITIAL_WINDOW_SIZE overflows an open stream's window": (
        (
            window_update(OPEN, MAX_WINDOW_SIZE - INITIAL_WINDOW_SIZE)
            + raw_settings((Setting.INITIAL_WINDOW_SIZE, INITIAL_WINDOW_SIZE + 1))
        ),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "MAX_FRAME_SIZE too small": (
        raw_settings((Setting.MAX_FRAME_SIZE, 2**14 - 1)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "MAX_FRAME_SIZE too large": (
        raw_settings((Setting.MAX_FRAME_SIZE, 2**24)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "ENABLE_PUSH is 2": (
        raw_settings((Setting.ENABLE_PUSH, 2)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "WINDOW_UPDATE by 0": (
        window_update(0, 0),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "WINDOW_UPDATE overflows the window": (
        window_update(0, MAX_WINDOW_SIZE),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "WINDOW_UPDATE of the wrong length": (
        frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(3)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
}


@pytest.mark.parametrize("breach", ENDS_CONNECTION)
async def test_connection_error_sends_goaway_and_closes(
    example: Example, breach: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancels its calls; other connections continue."""
    # A slow machine floods too slowly for the limits.
    monkeypatch.setattr(limits, "monotonic", lambda: 0.0)
    send, code = ENDS_CONNECTION[breach]
    async with wired(example) as wire, wired(example) as other:
        wire.send(wire.call(OPEN, "Wait"), frame(FrameType.DATA, 0, OPEN, message(b"")))
        await example.waiting.wait()
        wire.send(wire.made(send))
        found = await wire.next(FrameType.GOAWAY)
        assert ErrorCode.parse(found.payload[4:8]) == code
        await wire.closed()
        await example.cancelled.wait()
        await other.echoes(1)


async def test_calls_of_a_lost_connection_end_in_turns(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ends at once would hold the streams of other connections up."""
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)
    left: list[int] = []
    go_on = server_connection._Disconnection.go_on

    def observed(disconnection: server_connection._Disconnection, until: float) -> bool:
        more = go_on(disconnection, until)
        left.append(len(disconnection._left))
        return more

    monkeypatch.setattr(server_connection._Disconnection, "go_on", observed)
    async with wired(example) as wire, wired(example) as other:
        calls = range(1, 101, 2)
        wire.send(*(wire.call(stream, "Tidy") + wire.data(stream, b"") for stream in calls))
        # One that ends by itself in the meantime.
        wire.send(wire.call(101, "Echo"), wire.data(101, b"x"))
        await wire.answer(101)
        await example.waiting.wait()
        wire.writer.transport.abort()
        await example.cancelled.wait()
        example.may_end.set()
        await other.echoes(1)
    assert left == [*range(len(calls) - 1, -1, -1)]


async def test_one_read_takes_several_turns_and_waits_for_no_more(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)
    reading: list[bool] = []
    go_on = ServerConnection.go_on

    def observed(connection: ServerConnection, until: float) -> bool:
        if connection._waits_for_turn:
            reading.append(connection._transport.is_reading())
        return go_on(connection, until)

    monkeypatch.setattr(ServerConnection, "go_on", observed)
    async with wired(example) as wire:
        wire.send(frame(FrameType.PING, 0, 0, bytes(8)) * 50)
        for _ in range(50):
            await wire.next(FrameType.PING)
        await wire.echoes(1)
    assert len(reading) >= 40
    assert not any(reading)


async def test_calls_that_fail_by_their_clients_fault_are_rated(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other failures are not."""
    monkeypatch.setattr(rates, "FAILED_CALL", Rate("calls that fail", 20, 0.001))
    async with wired(example) as wire, wired(example) as other:
        for stream in range(1, 81, 2):
            other.send(other.call(stream, "Fail"), other.data(stream, b"lost"))
            await other.answer(stream)
        for stream in range(1, 41, 2):
            wire.send(wire.call(stream, "Refuse"), wire.data(stream, b""))
            assert (await wire.answer(stream))[1]["grpc-status"] == "3"
        wire.send(wire.call(41, "Refuse"), wire.data(41, b""))
        assert await wire.error() == (0, ErrorCode.ENHANCE_YOUR_CALM)
        await wire.closed()
        await other.echoes(81)


@pytest.mark.parametrize(
    ("limit", "method"),
    [
        *(("RST_STREAM", "Wait"), ("CLOSED_STREAM", "Refuse")),
        *(("FAILED_CALL", "Refuse"), ("REFUSED_CALL", "None")),
    ],
)
async def test_served_calls_pay_for_cancelled_and_wrong_ones(
    example: Example, monkeypatch: pytest.MonkeyPatch, limit: str, method: str
) -> None:
    """At any speed: no time passes between these calls."""
    monkeypatch.setattr(limits, "monotonic", lambda: 0.0)
    rate: Rate = getattr(rates, limit)
    monkeypatch.setattr(rates, limit, replace(rate, burst=20))
    streams = count(1, 2)

    async def bad_call(wire: Wire) -> None:
        stream = next(streams)
        wire.send(wire.call(stream, method), wire.data(stream, b""))
        if method == "Refuse":
            await wire.answer(stream)
        wire.send(rst_stream(stream, ErrorCode.CANCEL))

    async with wired(example) as wire:
        for _ in range(100):
            await wire.echoes(next(streams))
            await bad_call(wire)
        for _ in range(19):
            await bad_call(wire)
        await wire.echoes(next(streams))
        for _ in range(2):
            await bad_call(wire)
        while await wire.error() != (0, ErrorCode.ENHANCE_YOUR_CALM):
            pass


async def test_a_gateway_cancels_half_of_its_calls(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one connection, by a real client, at any speed."""
    monkeypatch.setattr(limits, "monotonic", lambda: 0.0)
    for rate in ("RST_STREAM", "CLOSED_STREAM", "WINDOW_UPDATE"):
        monkeypatch.setattr(rates, rate, replace(getattr(rates, rate), burst=300))
    async with grpc.aio.insecure_channel(example.address) as channel:
        echo: Any = channel.unary_unary("/example.Service/Echo")
        wait: Any = channel.unary_unary("/example.Service/Wait")
        for _ in range(10):
            served = [echo(b"x") for _ in range(100)]
            left = [wait(b"x") for _ in range(100)]
            assert set(await asyncio.gather(*served)) == {b"x"}
            for call in left:
                call.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        assert await echo(b"the same connection") == b"the same connection"
    assert len({context.peer() for context in example.contexts}) == 1


async def test_an_http1_client_gets_an_http1_response(example: Example) -> None:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{example.address}/v2/models", data=b"{}") as response,
    ):
        assert response.status == 400
        assert "This port speaks gRPC" in await response.text()


async def test_a_tls_client_gets_an_http1_response(example: Example) -> None:
    async with wired(example, greet=False) as wire:
        wire.send(b"\x16\x03\x01\x02")
        assert (await wire.closed()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (frame(FrameType.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.DATA, 0, 1, bytes(2**20 + 1)), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
async def test_first_frame_must_be_settings(
    example: Example, first: bytes, code: ErrorCode
) -> None:
    async with wired(example, greet=False) as wire:
        wire.send(PREFACE, first)
        assert (await wire.frame()).type == FrameType.SETTINGS
        assert await wire.error() == (0, code)
        await wire.closed()


async def test_settings_come_before_everything_else(example: Example) -> None:
    async with wired(example) as wire:
        first = await wire.frame()
        assert (first.type, first.flags) == (FrameType.SETTINGS, 0)


async def test_a_stopping_server_greets_a_silent_client_before_it_leaves(
    example: Example,
) -> None:
    async with wired(example, greet=False) as wire, wired(example) as other:
        await other.echoes(1)
        await example.server.stop(grace=None)
        assert (await wire.frame()).type == FrameType.SETTINGS
        await wire.next(FrameType.GOAWAY)
        await wire.closed()


async def test_frames_arrive_byte_by_byte(example: Example) -> None:
    async with wired(example, greet=False) as wire:
        sent = PREFACE + settings({}) + wire.call(1) + wire.data(1, b"slow")
        for byte in sent:
            wire.send(bytes((byte,)))
            await wire.writer.drain()
            await asyncio.sleep(0)
        assert (await wire.answer(1))[0] == message(b"slow")


async def test_unknown_frames_and_settings_are_ignored(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(frame(77, 0xFF, 0, b"extension"), raw_settings((99, 7)))
        wire.send(
            frame(FrameType.PRIORITY, 0, 1, bytes(5)), frame(FrameType.GOAWAY, 0, 0, bytes(8))
        )
        await wire.echoes(1)
        # The stream is closed, but these frames may have been in flight.
        wire.send(window_update(1, 5), rst_stream(1, ErrorCode.CANCEL))
        await wire.echoes(3)


async def test_headers_of_a_call_that_ended_on_both_sides_end_the_connection(
    example: Example,
) -> None:
    async with wired(example) as wire:
        await wire.echoes(1)
        wire.send(wire.call(1))
        assert await wire.error() == (0, ErrorCode.STREAM_CLOSED)
        await wire.closed()


async def test_data_of_a_call_that_ended_on_both_sides_is_a_stream_error(
    example: Example,
) -> None:
    async with wired(example) as wire:
        await wire.echoes(1)
        wire.send(wire.data(1, b"late"))
        assert await wire.error() == (1, ErrorCode.STREAM_CLOSED)
        await wire.echoes(3)


async def test_frames_under_way_when_the_server_ended_a_call_are_dropped(
    example: Example,
) -> None:
    async with wired(example) as wire:
        for stream, name in ((1, "None"), (3, "First")):
            wire.send(wire.call(stream, name), wire.data(stream, b"first", 0))
            await wire.answer(stream)
            assert await wire.error() == (stream, ErrorCode.NO_ERROR)
            wire.send(wire.data(stream, b"late", 0))
            trailers = bytes(wire.encoder.encode([("late", "1")]))
            wire.send(frame(FrameType.HEADERS, END_HEADERS | END_STREAM, stream, trailers))
        await wire.echoes(5)


async def test_closed_streams_are_forgotten(example: Example) -> None:
    """DATA on an old stream is taken for late."""
    async with wired(example) as wire:
        last = 2 * MAX_CLOSED_STREAMS + 3
        for stream in range(1, last, 2):
            wire.send(wire.call(stream, "None", END_STREAM))
            await wire.answer(stream)
        wire.send(wire.data(1, b"late"))
        await wire.echoes(last)
        (connection,) = example.server.clients.open
        assert len(connection._closed_streams._ended_by_peer) == MAX_CLOSED_STREAMS


async def test_ping_and_settings_are_acknowledged(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(frame(FrameType.PING, 0, 0, b"12345678"))
        acknowledged = await wire.next(FrameType.SETTINGS)
        while not acknowledged.flags & ACK:
            acknowledged = await wire.next(FrameType.SETTINGS)
        pong = await wire.next(FrameType.PING)
        assert (pong.flags, pong.payload) == (ACK, b"12345678")


async def test_smaller_header_table_is_acknowledged(example: Example) -> None:
    async with wired(example, {Setting.HEADER_TABLE_SIZE: 0}) as wire:
        wire.shrink_table(0)
        await wire.echoes(1)
        wire.send(wire.call(3, flags=END_STREAM, changes={":method": "GET"}))
        assert await wire.answer(3) == (b"", {":status": "405"})


async def test_invalid_header_block_is_neither_logged_nor_returned(
    example: Example, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with wired(example) as wire:
        block = b"\x00" + b"\xff" * 9 + b"Bearer s3cret"
        wire.send(frame(FrameType.HEADERS, END_HEADERS, 1, block))
        found = await wire.next(FrameType.GOAWAY)
    assert b"s3cret" not in found.payload
    assert "s3cret" not in caplog.text


async def test_connection_accepted_before_stop_is_closed(example: Example) -> None:
    """The protocol of an accepted socket is created after the stop."""
    await example.server.stop(grace=None)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: ServerConnection(example.server.clients), ours)
        async with asyncio.timeout(60):
            while await loop.sock_recv(theirs, 4096):
                pass


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
async def test_accepted_sockets_have_a_tcp_user_timeout(example: Example) -> None:
    async with wired(example) as wire:
        await wire.echoes(1)
        (connection,) = example.server.clients.open
        accepted = connection._transport.get_extra_info("socket")
        milliseconds = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert milliseconds == http2_connection.PAUSE_SECONDS * 1000


async def test_keepalive_aborts_a_silent_client(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(http2_connection, "PING_TIMEOUT_SECONDS", 5.0)
    async with wired(example) as wire:
        wire.send(wire.call(1, "Wait"), wire.data(1, b""))
        for _ in range(3):
            ping = await wire.next(FrameType.PING)
            wire.send(frame(FrameType.PING, ACK, 0, ping.payload))
        await wire.next(FrameType.PING)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await wire.next(FrameType.PING)
        await example.cancelled.wait()


async def test_a_client_without_settings_is_closed(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.05)
    async with wired(example, greet=False) as wire:
        wire.send(PREFACE[:5])
        with suppress(ConnectionError):
            assert b"PING" not in await wire.closed()


async def test_a_single_request_must_arrive_in_time(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.5)
    monkeypatch.setattr("trtmesh.chassis.grpc.server.call.REQUEST_SECONDS", 0.1)
    async with wired(example) as wire:
        wire.send(wire.call(1, "Echo"), wire.call(3, "Chat"))
        _, said = await wire.answer(1)
        assert said["grpc-status"] == "4"
        wire.send(wire.data(3, b"ab"))
        assert (await wire.answer(3))[0] == message(b"ba")


@pytest.mark.parametrize(
    "begun",
    [
        frame(FrameType.HEADERS, END_HEADERS, 3, bytes(100))[:-1],
        frame(FrameType.HEADERS, 0, 3),
        frame(FrameType.HEADERS, 0, 3) + frame(FrameType.CONTINUATION, 0, 3),
    ],
)
async def test_a_header_block_must_arrive_in_time(
    example: Example, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(http2_connection, "PING_TIMEOUT_SECONDS", 10.0)
    monkeypatch.setattr(http2_connection, "FRAME_SECONDS", 0.02)
    async with wired(example) as wire:
        await wire.echoes(1)
        wire.send(begun)
        found = await wire.next(FrameType.GOAWAY)
        assert ErrorCode.parse(found.payload[4:8]) == ErrorCode.ENHANCE_YOUR_CALM
        await wire.closed()


async def test_incomplete_frames_count_as_unread(example: Example) -> None:
    async with wired(example) as wire:
        await wire.echoes(1)
        padded = frame(FrameType.DATA, PADDED, 3, bytes(2**20))
        wire.send(wire.call(3, "Chat"), padded[: 2**19])
        while example.server.clients.budget.held < 2**19 - 2**16:  # noqa: ASYNC110 - a count sets no event
            await asyncio.sleep(0)
    while example.server.clients.budget.held:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_the_largest_unread_answer_gives_way(example: Example) -> None:
    """Unread answers have a total; who holds little is not disturbed."""
    example.server.clients.answers.limit = 3 * 2**20
    no_window = {Setting.INITIAL_WINDOW_SIZE: 10}
    async with wired(example, no_window) as modest, wired(example, no_window) as greedy:
        modest.send(modest.call(1, "Many"), modest.data(1, b"1,100000"))
        await modest.next(FrameType.DATA)
        for stream, size in ((1, b"1,1000000"), (3, b"1,3000000")):
            greedy.send(greedy.call(stream, "Many"), greedy.data(stream, size))
        assert await greedy.error() == (3, ErrorCode.ENHANCE_YOUR_CALM)
        for wire, held in ((modest, 100_000), (greedy, 1_000_000)):
            wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, 2**21)), window_update(0, 2**21))
            body, said = await wire.answer(1)
            assert (len(body), said["grpc-status"]) == (held + 5 - 10, "0")
        await greedy.echoes(5)
    assert example.server.clients.answers.held == 0


async def test_what_a_transport_holds_counts_as_unread(example: Example) -> None:
    """Many connections with a little each are as much as one with all."""
    example.hold_unread(4096)
    limits = {Setting.INITIAL_WINDOW_SIZE: 2**24}
    async with (
        wired(example, limits, receive_bytes=4096) as greedy,
        wired(example, limits) as modest,
    ):
        greedy.send(window_update(0, 2**24), greedy.call(1, "Many"), greedy.data(1, b"9,100000"))
        while example.server.clients.answers.held < MAX_PASS_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await modest.echoes(1)
        example.server.clients.answers.limit = MAX_PASS_BYTES
        modest.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, 10)), modest.call(3, "Many"))
        modest.send(modest.data(3, b"1,1000"))
        with suppress(ConnectionError):
            await greedy.closed()
        modest.send(window_update(3, 1000))
        assert (await modest.answer(3))[1]["grpc-status"] == "0"
    while example.server.clients.answers.held:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_late_event_loop_does_not_judge_its_peers(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(http2_connection, "PING_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(http2_connection, "LATE_SECONDS", 0.1)
    async with wired(example) as wire:
        await wire.echoes(1)
        await wire.next(FrameType.PING)
        time.sleep(1.0)  # noqa: ASYNC251 - the loop is late
        await wire.echoes(3)


async def test_a_late_event_loop_sends_no_ping_before_its_settings(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 2.0)
    monkeypatch.setattr(http2_connection, "LATE_SECONDS", 0.2)
    async with wired(example, greet=False) as wire, wired(example) as other:
        await other.echoes(1)
        time.sleep(2.5)  # noqa: ASYNC251 - the loop is late
        await asyncio.sleep(0)
        wire.send(PREFACE, settings({}))
        assert (await wire.frame()).type == FrameType.SETTINGS


@pytest.mark.parametrize("seed", range(20))
async def test_random_frames_do_not_harm_other_connections(
    example: Example, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(seed)
    async with wired(example) as other:
        for _ in range(20):
            async with wired(example) as wire:
                wire.send(wire.call(1, chance.choice(["Echo", "Join", "Chat", "Wait"])))
                for _ in range(chance.randint(1, 30)):
                    wire.send(nonsense(chance))
        await other.echoes(1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def nonsense(chance: random.Random) -> bytes:
    """A frame of plausible parts, or random bytes."""
    payload = chance.choice(
        [
            chance.randbytes(chance.choice([0, 1, 4, 5, 6, 8, 300])),
            message(chance.randbytes(7)),
            bytes((0x83, 0x86, 0x44, 0x01)) + chance.randbytes(1),
        ]
    )
    flags = chance.choice([0, ACK, END_HEADERS, PADDED, PRIORITY, chance.randrange(256)])
    kind = chance.choice([*FrameType, chance.randrange(256)])
    return frame(kind, flags, chance.choice([0, 1, 1, 1, 2, 3, 5]), payload)
