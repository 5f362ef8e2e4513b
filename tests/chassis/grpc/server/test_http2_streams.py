"""Calls by the rules of HTTP/2, kept and broken by a client that sends its own frames."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example
from chassis.grpc.server.wire import OPEN, Breach, message, wired
from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    MOST_WINDOW_BYTES,
    PADDED,
    ErrorCode,
    Kind,
    frame,
    reset,
    window_update,
)

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
    monkeypatch.setattr("trtmesh.chassis.grpc.server.streams.MOST_CALLS", 100)
    async with wired(example) as wire:
        opened: Sequence[int] = range(1, 801, 2)
        wire.send(*(wire.call(s, "Wait", END_STREAM) + reset(s, ErrorCode.CANCEL) for s in opened))
        refused = [await wire.error() for _ in range(300)]
        assert {code for _, code in refused} == {ErrorCode.REFUSED_STREAM}
        await wire.echoes(801)


async def test_values_of_binary_metadata_may_be_joined(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, changes={"data-bin": "AAE=, Ag,Aw=="}), wire.data(1, b""))
        await wire.answer(1)
    metadata = example.contexts[0].invocation_metadata()
    assert metadata == (("data-bin", b"\0\1"), ("data-bin", b"\2"), ("data-bin", b"\3"))


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
