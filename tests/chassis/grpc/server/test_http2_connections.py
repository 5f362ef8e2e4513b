"""Connections by the rules of HTTP/2, kept and broken by a client that sends its own frames."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from chassis.grpc.server.conftest import Example
from chassis.grpc.server.wire import OPEN, Breach, message, raw_settings, wired
from trtmesh.chassis.grpc.server.connection import Connection
from trtmesh.chassis.http2 import keepalive
from trtmesh.chassis.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW_BYTES,
    HAS_PRIORITY,
    MOST_WINDOW_BYTES,
    PADDED,
    PREFACE,
    ErrorCode,
    Kind,
    Setting,
    frame,
    reset,
    settings,
    window_update,
)

ENDS_CONNECTION: dict[str, tuple[Breach, ErrorCode]] = {
    "a frame that is too long": (
        frame(Kind.DATA, 0, OPEN, bytes(2**20 + 1)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "data of a stream that was never opened": (
        lambda wire: wire.data(99, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "data of no stream": (lambda wire: wire.data(0, b""), ErrorCode.PROTOCOL_ERROR),
    "an even stream": (lambda wire: wire.call(4), ErrorCode.PROTOCOL_ERROR),
    "headers of no stream": (lambda wire: wire.call(0), ErrorCode.PROTOCOL_ERROR),
    "padding as long as its frame": (
        frame(Kind.DATA, PADDED, OPEN, b"\x04abc"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "padding without its length": (
        frame(Kind.DATA, PADDED, OPEN),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a priority that is cut off": (
        frame(Kind.HEADERS, END_HEADERS | HAS_PRIORITY, 3, b"\0\0\0"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "headers that cannot be read": (
        frame(Kind.HEADERS, END_HEADERS, 3, b"\xff\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a header list that unfolds": (
        frame(Kind.HEADERS, END_HEADERS, 3, b"\x40\x01a\x7f\x81\x1f" + b"x" * 4096 + b"\xbe" * 60),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a continuation without its beginning": (
        frame(Kind.CONTINUATION, END_HEADERS, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a continuation of another stream": (
        frame(Kind.HEADERS, 0, 3) + frame(Kind.CONTINUATION, END_HEADERS, 5),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a header block that is interrupted": (
        frame(Kind.HEADERS, 0, 3) + frame(Kind.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a header block that is too long": (
        frame(Kind.HEADERS, END_HEADERS, 3, bytes(2**16 + 1)),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "settings that change too often": (
        raw_settings((Setting.INITIAL_WINDOW_SIZE, 1)) * 1000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a header block without end": (
        frame(Kind.HEADERS, 0, 3) + frame(Kind.CONTINUATION, 0, 3) * 8000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a promise": (
        frame(Kind.PUSH_PROMISE, END_HEADERS, OPEN, bytes(4)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a ping of the wrong size": (
        frame(Kind.PING, 0, 0, bytes(7)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a reset of the wrong size": (
        frame(Kind.RST_STREAM, 0, OPEN, bytes(3)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a reset of a stream that was never opened": (
        reset(9, ErrorCode.CANCEL),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "settings that are cut off": (
        frame(Kind.SETTINGS, 0, 0, bytes(5)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "settings of a stream": (
        frame(Kind.SETTINGS, 0, OPEN),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a first window that is too large": (
        raw_settings((Setting.INITIAL_WINDOW_SIZE, 2**31)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a first window that makes an open one too large": (
        (
            window_update(OPEN, MOST_WINDOW_BYTES - FIRST_WINDOW_BYTES)
            + raw_settings((Setting.INITIAL_WINDOW_SIZE, FIRST_WINDOW_BYTES + 1))
        ),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a frame size that is too small": (
        raw_settings((Setting.MAX_FRAME_SIZE, 2**14 - 1)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a frame size that is too large": (
        raw_settings((Setting.MAX_FRAME_SIZE, 2**24)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "push that is neither on nor off": (
        raw_settings((Setting.ENABLE_PUSH, 2)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that grows by nothing": (
        window_update(0, 0),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that grows too large": (
        window_update(0, MOST_WINDOW_BYTES),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a window of the wrong size": (
        frame(Kind.WINDOW_UPDATE, 0, 0, bytes(3)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
}


@pytest.mark.parametrize("breach", ENDS_CONNECTION)
async def test_what_ends_the_connection(example: Example, breach: str) -> None:
    """And every call of it; other connections go on."""
    send, code = ENDS_CONNECTION[breach]
    async with wired(example) as wire, wired(example) as other:
        wire.send(wire.call(OPEN, "Wait"), frame(Kind.DATA, 0, OPEN, message(b"")))
        await example.waiting.wait()
        wire.send(wire.made(send))
        assert await wire.error() == (0, code)
        await wire.closed()
        await example.cancelled.wait()
        await other.echoes(1)


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02"])
async def test_other_protocols_are_told(example: Example, greeting: bytes) -> None:
    async with wired(example, greet=False) as wire:
        wire.send(greeting)
        assert b"This port speaks gRPC" in await wire.closed()


async def test_settings_come_first(example: Example) -> None:
    async with wired(example, greet=False) as wire:
        wire.send(PREFACE, frame(Kind.PING, 0, 0, bytes(8)))
        assert b"This port speaks gRPC" in await wire.closed()


async def test_bytes_may_come_one_by_one(example: Example) -> None:
    async with wired(example, greet=False) as wire:
        sent = PREFACE + settings({}) + wire.call(1) + wire.data(1, b"slow")
        for byte in sent:
            wire.send(bytes((byte,)))
            await wire.writer.drain()
            await asyncio.sleep(0)
        assert (await wire.answer(1))[0] == message(b"slow")


async def test_what_is_unknown_is_passed_over(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(frame(77, 0xFF, 0, b"extension"), raw_settings((99, 7)))
        wire.send(frame(Kind.PRIORITY, 0, 1, bytes(5)), frame(Kind.GOAWAY, 0, 0, bytes(8)))
        await wire.echoes(1)
        # Its stream is over, and these may have been on their way.
        wire.send(window_update(1, 5), reset(1, ErrorCode.CANCEL), wire.data(1, b"late"))
        await wire.echoes(3)


async def test_pings_and_settings_are_acknowledged(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(frame(Kind.PING, 0, 0, b"12345678"))
        acknowledged = await wire.next(Kind.SETTINGS)
        while not acknowledged.flags & ACK:
            acknowledged = await wire.next(Kind.SETTINGS)
        pong = await wire.next(Kind.PING)
        assert (pong.flags, pong.payload) == (ACK, b"12345678")


async def test_a_client_with_a_smaller_table_of_headers_is_told(example: Example) -> None:
    async with wired(example, {Setting.HEADER_TABLE_SIZE: 0}) as wire:
        wire.shrink_table(0)
        await wire.echoes(1)
        wire.send(wire.call(3, flags=END_STREAM, changes={":method": "GET"}))
        assert await wire.answer(3) == (b"", {":status": "405"})


async def test_headers_that_cannot_be_read_are_neither_logged_nor_sent_back(
    example: Example, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with wired(example) as wire:
        block = b"\x00" + b"\xff" * 9 + b"Bearer s3cret"
        wire.send(frame(Kind.HEADERS, END_HEADERS, 1, block))
        found = await wire.next(Kind.GOAWAY)
    assert b"s3cret" not in found.payload
    assert "s3cret" not in caplog.text


async def test_a_connection_that_comes_behind_the_stop_is_closed(example: Example) -> None:
    """It was accepted before, and its protocol is made afterwards."""
    await example.server.stop(grace=None)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: Connection(example.server), ours)
        async with asyncio.timeout(10):
            while await loop.sock_recv(theirs, 4096):
                pass


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
async def test_the_system_gives_up_a_client_that_acknowledges_nothing(example: Example) -> None:
    async with wired(example) as wire:
        await wire.echoes(1)
        (connection,) = example.server._connections
        accepted = connection._transport.get_extra_info("socket")
        milliseconds = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert milliseconds == keepalive.ANSWER_SECONDS * 1000


async def test_a_silent_client_is_given_up(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepalive, "SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(keepalive, "ANSWER_SECONDS", 0.05)
    async with wired(example) as wire:
        wire.send(wire.call(1, "Wait"), wire.data(1, b""))
        for _ in range(3):
            ping = await wire.next(Kind.PING)
            wire.send(frame(Kind.PING, ACK, 0, ping.payload))
        await wire.next(Kind.PING)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await wire.next(Kind.PING)
        await example.cancelled.wait()


@pytest.mark.parametrize("seed", range(20))
async def test_nonsense_harms_nobody_else(
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
    """A frame whose parts make sense one by one, or some bytes."""
    payload = chance.choice(
        [
            chance.randbytes(chance.choice([0, 1, 4, 5, 6, 8, 300])),
            message(chance.randbytes(7)),
            bytes((0x83, 0x86, 0x44, 0x01)) + chance.randbytes(1),
        ]
    )
    flags = chance.choice([0, ACK, END_HEADERS, PADDED, HAS_PRIORITY, chance.randrange(256)])
    kind = chance.choice([*Kind, chance.randrange(256)])
    return frame(kind, flags, chance.choice([0, 1, 1, 1, 2, 3, 5]), payload)
