"""The server's connections, with scripted client frames."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from chassis.grpc.server.conftest import Example
from chassis.grpc.server.wire import OPEN, Breach, message, raw_settings, wired
from trtmesh.chassis.grpc.server.connection import ServerConnection
from trtmesh.chassis.http2 import connection as http2_connection
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
        ErrorCode.FRAME_SIZE_ERROR,
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
async def test_connection_error_sends_goaway_and_closes(example: Example, breach: str) -> None:
    """Cancels its calls; other connections continue."""
    send, code = ENDS_CONNECTION[breach]
    async with wired(example) as wire, wired(example) as other:
        wire.send(wire.call(OPEN, "Wait"), frame(FrameType.DATA, 0, OPEN, message(b"")))
        await example.waiting.wait()
        wire.send(wire.made(send))
        assert await wire.error() == (0, code)
        await wire.closed()
        await example.cancelled.wait()
        await other.echoes(1)


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02"])
async def test_other_protocols_get_an_http1_response(example: Example, greeting: bytes) -> None:
    async with wired(example, greet=False) as wire:
        wire.send(greeting)
        assert b"This port speaks gRPC" in await wire.closed()


async def test_first_frame_must_be_settings(example: Example) -> None:
    async with wired(example, greet=False) as wire:
        wire.send(PREFACE, frame(FrameType.PING, 0, 0, bytes(8)))
        assert b"This port speaks gRPC" in await wire.closed()


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
        wire.send(window_update(1, 5), rst_stream(1, ErrorCode.CANCEL), wire.data(1, b"late"))
        await wire.echoes(3)


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
        await loop.connect_accepted_socket(lambda: ServerConnection(example.server), ours)
        async with asyncio.timeout(10):
            while await loop.sock_recv(theirs, 4096):
                pass


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
async def test_accepted_sockets_have_a_tcp_user_timeout(example: Example) -> None:
    async with wired(example) as wire:
        await wire.echoes(1)
        (connection,) = example.server._connections
        accepted = connection._transport.get_extra_info("socket")
        milliseconds = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert milliseconds == http2_connection.PING_TIMEOUT_SECONDS * 1000


async def test_keepalive_aborts_a_silent_client(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(http2_connection, "PING_TIMEOUT_SECONDS", 0.05)
    async with wired(example) as wire:
        wire.send(wire.call(1, "Wait"), wire.data(1, b""))
        for _ in range(3):
            ping = await wire.next(FrameType.PING)
            wire.send(frame(FrameType.PING, ACK, 0, ping.payload))
        await wire.next(FrameType.PING)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await wire.next(FrameType.PING)
        await example.cancelled.wait()


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
