"""The rules of HTTP/2, kept and broken by a client that sends its own frames."""

from __future__ import annotations

import asyncio
import random
import socket
import zlib
from collections.abc import Sequence

import pytest
from chassis.grpc_server.conftest import MOST_BYTES, Example
from chassis.grpc_server.wire import Breach, message, wired
from trtmesh.chassis.grpc_server.connection import Connection
from trtmesh.chassis.grpc_wire.frames import (
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
from trtmesh.chassis.grpc_wire.keepalive import give_up_unacknowledged

OPEN = 1
"""A call that waits."""


def raw_settings(*values: tuple[int, int]) -> bytes:
    payload = b"".join(n.to_bytes(2) + v.to_bytes(4) for n, v in values)
    return frame(Kind.SETTINGS, 0, 0, payload)


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


ENDS_CALL: dict[str, tuple[Breach, ErrorCode]] = {
    "a window that grows by nothing": (
        window_update(OPEN, 0),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that grows too large": (
        window_update(OPEN, MOST_WINDOW_BYTES),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "headers that are no trailers": (lambda wire: wire.call(OPEN), ErrorCode.PROTOCOL_ERROR),
    "data behind the end": (
        lambda wire: wire.data(OPEN, b"", END_STREAM) * 2,
        ErrorCode.STREAM_CLOSED,
    ),
    "more data than the window": (
        lambda wire: frame(Kind.DATA, 0, OPEN, message(b"x")) + wire.data(OPEN, bytes(66_000)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("breach", ENDS_CALL)
async def test_what_ends_a_call_alone(example: Example, breach: str) -> None:
    send, code = ENDS_CALL[breach]
    async with wired(example) as wire:
        wire.send(wire.call(OPEN, "Ignore"), wire.made(send))
        assert await wire.error() == (OPEN, code)
        await wire.echoes(3)


MALFORMED: dict[str, dict[str, str | None]] = {
    "no path": {":path": None},
    "no scheme": {":scheme": None},
    "a pseudo header of responses": {":status": "200"},
    "a pseudo header behind others": {"x": "1", ":other": "1"},
    "an upper-case name": {"Name": "1"},
    "a header of connections": {"connection": "close"},
    "a header of two lines": {"x": "1\n2"},
    "a header with a zero": {"x": "1\0"},
    "a timeout without unit": {"grpc-timeout": "10"},
    "a timeout that is too long": {"grpc-timeout": "123456789S"},
    "binary metadata that is no base64": {"data-bin": "!"},
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_requests_end_alone(example: Example, name: str) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, changes=MALFORMED[name]))
        assert await wire.error() == (1, ErrorCode.PROTOCOL_ERROR)
        await wire.echoes(3)
    assert len(example.contexts) == 1


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({":method": "GET"}, "405"),
        ({"content-type": "text/html"}, "415"),
        ({"content-type": "application/grpc-web+proto"}, "415"),
    ],
)
async def test_what_is_no_call_gets_a_status_of_http(
    example: Example, changes: dict[str, str], status: str
) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, flags=END_STREAM, changes=changes))
        assert await wire.answer(1) == (b"", {":status": status})
        await wire.echoes(3)


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


async def test_headers_and_data_may_be_cut_anywhere(example: Example) -> None:
    async with wired(example) as wire:
        block = wire.block("Join")
        padded = b"\x02" + bytes(5) + block[:7] + b"\0\0"
        wire.send(frame(Kind.HEADERS, PADDED | HAS_PRIORITY, 1, padded))
        wire.send(frame(Kind.CONTINUATION, 0, 1, block[7:20]))
        wire.send(frame(Kind.CONTINUATION, END_HEADERS, 1, block[20:]))
        data = message(b"one") + message(b"") + message(b"two")
        wire.send(frame(Kind.DATA, PADDED, 1, b"\x03" + data[:3] + b"\0\0\0"))
        wire.send(frame(Kind.DATA, 0, 1, data[3:12]), frame(Kind.DATA, 0, 1))
        wire.send(frame(Kind.DATA, END_STREAM, 1, data[12:]))
        assert (await wire.answer(1))[0] == message(b"onetwo")


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


async def test_data_stays_within_the_windows(example: Example) -> None:
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b"1,40"))
        assert len((await wire.next(Kind.DATA)).payload) == 10
        # Smaller first windows make an open one negative, and what opens it counts from there.
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, 5)), window_update(1, 5))
        wire.send(window_update(1, 3), frame(Kind.PING, 0, 0, bytes(8)))
        found = await wire.next(Kind.DATA, Kind.PING)
        assert (found.kind, len(found.payload)) == (Kind.DATA, 3)
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, FIRST_WINDOW_BYTES)))
        body, said = await wire.answer(1)
        assert (len(body), said["grpc-status"]) == (45 - 13, "0")


async def test_data_that_new_settings_let_go_follows_their_acknowledgement(
    example: Example,
) -> None:
    """Until it reads that, a client counts by the windows it had before."""
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b"1,40"))
        await wire.next(Kind.DATA)
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, 1000)))
        assert (await wire.next(Kind.SETTINGS, Kind.DATA)).kind == Kind.SETTINGS
        body, _ = await wire.answer(1)
        assert len(body) == 35


async def test_the_connections_window_is_shared_in_turns(example: Example) -> None:
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 2**20}) as wire:
        for stream in (1, 3):
            wire.send(wire.call(stream, "Many"), wire.data(stream, b"1,200000"))
        got = {1: 0, 3: 0}
        while sum(got.values()) < FIRST_WINDOW_BYTES:
            found = await wire.next(Kind.DATA)
            got[found.stream] += len(found.payload)
        assert sum(got.values()) == FIRST_WINDOW_BYTES
        wire.send(window_update(0, 40_000))
        while sum(got.values()) < FIRST_WINDOW_BYTES + 40_000:
            found = await wire.next(Kind.DATA)
            got[found.stream] += len(found.payload)
        assert min(got.values()) >= 16_384
        wire.send(reset(1, ErrorCode.CANCEL), window_update(0, 2**20))
        body, _ = await wire.answer(3)
        assert got[3] + len(body) == 200_005


async def test_a_long_message_is_let_in_whole(example: Example) -> None:
    body = b"x" * MOST_BYTES
    async with wired(example) as wire:
        data, left = message(body), FIRST_WINDOW_BYTES
        wire.send(wire.call(1, "Fail"))
        sent = 0
        while sent < len(data):
            size = min(2**14, left, len(data) - sent)
            if size:
                wire.send(frame(Kind.DATA, 0, 1, data[sent : sent + size]))
                sent, left = sent + size, left - size
            else:
                grown = await wire.next(Kind.WINDOW_UPDATE, stream=1)
                left += int.from_bytes(grown.payload)
        wire.send(frame(Kind.DATA, END_STREAM, 1))
        assert (await wire.answer(1))[1]["grpc-status"] == "15"


async def test_a_call_that_does_not_read_holds_one_window(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, "Ignore"))
        wire.send(*[frame(Kind.DATA, 0, 1, message(bytes(1019)))] * 63)
        await wire.echoes(3)
        wire.send(frame(Kind.DATA, 0, 1, message(bytes(1018))))
        await wire.echoes(5)
        wire.send(frame(Kind.DATA, 0, 1, b"\0"))
        assert await wire.error() == (1, ErrorCode.FLOW_CONTROL_ERROR)


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (message(b"abc", compressed=True), "identity", "12"),
        (message(b"abc", compressed=True), "snappy", "12"),
        (message(b"abc", compressed=True), "gzip", "13"),
        (message(zlib.compress(b"abc")[:-2], compressed=True), "deflate", "13"),
        (message(zlib.compress(bytes(MOST_BYTES + 1)), compressed=True), "deflate", "8"),
        (b"\0\xff\xff\xff\xff", "identity", "8"),
        (message(b"abc")[:-1], "identity", "13"),
        (b"", "identity", "12"),
    ],
)
async def test_messages_that_cannot_be_taken(
    example: Example, data: bytes, encoding: str, status: str
) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, changes={"grpc-encoding": encoding}))
        wire.send(frame(Kind.DATA, END_STREAM, 1, data))
        _, said = await wire.answer(1)
        assert said["grpc-status"] == status
        assert said["grpc-message"]
        await wire.echoes(3)
    assert len(example.contexts) == 1


async def test_metadata_that_is_too_large_ends_its_call_alone(example: Example) -> None:
    async with wired(example) as wire:
        block = wire.block("Echo", {"much": "x" * 20_000})
        for start in range(0, len(block), 9000):
            kind = Kind.CONTINUATION if start else Kind.HEADERS
            flags = END_HEADERS if start + 9000 >= len(block) else 0
            wire.send(frame(kind, flags, 1, block[start : start + 9000]))
        _, said = await wire.answer(1)
        assert said["grpc-status"] == "8"
        await wire.echoes(3)


async def test_a_reset_call_cancels_its_handler(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, "Wait"), wire.data(1, b""))
        wire.send(reset(1, ErrorCode.CANCEL))
        await wire.echoes(3)
        wire.send(wire.call(5, "Wait"), wire.data(5, b""))
        await example.waiting.wait()
        wire.send(reset(5, ErrorCode.CANCEL))
        await example.cancelled.wait()


async def test_a_handler_that_cleans_up_is_not_cancelled_again(example: Example) -> None:
    """Its deadline is over, its client resets the call, and then is gone."""
    async with wired(example) as wire:
        wire.send(wire.call(1, "Tidy", changes={"grpc-timeout": "50m"}), wire.data(1, b""))
        assert (await wire.answer(1))[1]["grpc-status"] == "4"
        wire.send(reset(1, ErrorCode.CANCEL))
        await wire.echoes(3)
    async with wired(example) as wire:
        await wire.echoes(1)
    example.may_end.set()
    async with asyncio.timeout(10):
        await example.tidied.wait()


async def test_calls_that_are_opened_and_reset_count_until_their_handlers_end(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmesh.chassis.grpc_server.streams.MOST_CALLS", 100)
    async with wired(example) as wire:
        opened: Sequence[int] = range(1, 801, 2)
        wire.send(*(wire.call(s, "Wait", END_STREAM) + reset(s, ErrorCode.CANCEL) for s in opened))
        refused = [await wire.error() for _ in range(300)]
        assert {code for _, code in refused} == {ErrorCode.REFUSED_STREAM}
        await wire.echoes(801)


@pytest.mark.parametrize("what", ["pings", "calls that fail"])
async def test_a_client_that_asks_and_does_not_read_is_cut_off(
    example: Example, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("trtmesh.chassis.grpc_wire.output.MOST_UNREAD_BYTES", 2**18)
    async with wired(example, receive_bytes=4096) as wire, wired(example) as other:
        ping = frame(Kind.PING, 0, 0, bytes(8))
        asks = (
            ping if what == "pings" else wire.call(stream, "Fail") + wire.data(stream, b"x" * 4000)
            for stream in range(1, 2**20, 2)
        )
        with pytest.raises(ConnectionError):
            await wire.send_all(asks)
        await other.echoes(1)


async def test_a_write_that_waited_is_dropped_when_its_call_ended_meanwhile(
    example: Example,
) -> None:
    """Data behind the end of a stream ends the connection with some clients."""
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "WriteLate"), wire.data(1, b""))
        await wire.next(Kind.DATA)
        wire.send(window_update(1, 1000))
        body, said = await wire.answer(1)
        assert (len(body), said["grpc-status"]) == (95, "0")
        await example.late.wait()
        wire.send(frame(Kind.PING, 0, 0, bytes(8)))
        assert (await wire.next(Kind.PING, Kind.DATA)).kind == Kind.PING


async def test_a_client_with_a_smaller_table_of_headers_is_told(example: Example) -> None:
    async with wired(example, {Setting.HEADER_TABLE_SIZE: 0}) as wire:
        wire.shrink_table(0)
        await wire.echoes(1)
        wire.send(wire.call(3, flags=END_STREAM, changes={":method": "GET"}))
        assert await wire.answer(3) == (b"", {":status": "405"})


async def test_values_of_binary_metadata_may_be_joined(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, changes={"data-bin": "AAE=, Ag,Aw=="}), wire.data(1, b""))
        await wire.answer(1)
    metadata = example.contexts[0].invocation_metadata()
    assert metadata == (("data-bin", b"\0\1"), ("data-bin", b"\2"), ("data-bin", b"\3"))


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


async def test_rules_that_calls_break_are_not_logged(
    example: Example, caplog: pytest.LogCaptureFixture
) -> None:
    """A client breaks them as fast as it sends."""
    caplog.set_level("INFO")
    async with wired(example) as wire:
        wire.send(wire.call(1, changes={"connection": "close"}))
        await wire.error()
        await wire.echoes(3)
    assert not caplog.records


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
def test_connections_end_that_acknowledge_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        give_up_unacknowledged(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000


async def test_a_silent_client_is_given_up(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmesh.chassis.grpc_wire.keepalive.SILENCE_SECONDS", 0.05)
    monkeypatch.setattr("trtmesh.chassis.grpc_wire.keepalive.ANSWER_SECONDS", 0.05)
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
