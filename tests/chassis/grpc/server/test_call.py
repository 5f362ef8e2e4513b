"""The server's streams and calls, with scripted client frames."""

from __future__ import annotations

import asyncio
import zlib

import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example
from chassis.grpc.server.wire import OPEN, Breach, message, wired
from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    MAX_WINDOW_SIZE,
    PADDED,
    PRIORITY,
    ErrorCode,
    FrameType,
    frame,
    rst_stream,
    window_update,
)

ENDS_CALL: dict[str, tuple[Breach, ErrorCode]] = {
    "WINDOW_UPDATE by 0": (
        window_update(OPEN, 0),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "WINDOW_UPDATE overflows the window": (
        window_update(OPEN, MAX_WINDOW_SIZE),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "trailers without END_STREAM": (lambda wire: wire.call(OPEN), ErrorCode.PROTOCOL_ERROR),
    "trailers with a pseudo-header": (
        lambda wire: wire.call(OPEN, flags=END_STREAM),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS after END_STREAM": (
        lambda wire: wire.data(OPEN, b"", END_STREAM) + wire.call(OPEN, flags=END_STREAM),
        ErrorCode.STREAM_CLOSED,
    ),
    "DATA after END_STREAM": (
        lambda wire: wire.data(OPEN, b"", END_STREAM) * 2,
        ErrorCode.STREAM_CLOSED,
    ),
    "DATA exceeds the window": (
        lambda wire: frame(FrameType.DATA, 0, OPEN, message(b"x")) + wire.data(OPEN, bytes(66_000)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("breach", ENDS_CALL)
async def test_stream_error_resets_only_its_stream(example: Example, breach: str) -> None:
    send, code = ENDS_CALL[breach]
    async with wired(example) as wire:
        wire.send(wire.call(OPEN, "Ignore"), wire.made(send))
        assert await wire.error() == (OPEN, code)
        await wire.echoes(3)


MALFORMED: dict[str, dict[str, str | None]] = {
    "no path": {":path": None},
    "empty path": {":path": ""},
    "no scheme": {":scheme": None},
    "te is not trailers": {"te": "gzip"},
    "content-length is no number": {"content-length": "-1"},
    "pseudo-header of responses": {":status": "200"},
    "late pseudo-header": {"x": "1", ":other": "1"},
    "upper-case name": {"Name": "1"},
    "connection-specific header": {"connection": "close"},
    "header with a line break": {"x": "1\n2"},
    "header with NUL": {"x": "1\0"},
    "timeout without unit": {"grpc-timeout": "10"},
    "timeout with too many digits": {"grpc-timeout": "123456789S"},
    "binary metadata is not base64": {"data-bin": "!"},
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_request_resets_only_its_stream(example: Example, name: str) -> None:
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
async def test_request_without_grpc_gets_an_http_status(
    example: Example, changes: dict[str, str], status: str
) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, flags=END_STREAM, changes=changes))
        assert await wire.answer(1) == (b"", {":status": status})
        await wire.echoes(3)


@pytest.mark.parametrize("length", [0, 6, 7, 11, 13])
async def test_wrong_content_length_resets_the_stream(example: Example, length: int) -> None:
    """The request has 12 bytes in two frames."""
    async with wired(example) as wire:
        wire.send(wire.call(1, "Join", changes={"content-length": str(length)}))
        wire.send(frame(FrameType.DATA, PADDED, 1, b"\2" + message(b"ab") + bytes(2)))
        wire.send(wire.data(1, b""))
        assert await wire.error() == (1, ErrorCode.PROTOCOL_ERROR)
        await wire.echoes(3)


async def test_content_beyond_its_length_is_not_read(example: Example) -> None:
    """Read, it would be the beginning of a message that is too large."""
    async with wired(example) as wire:
        wire.send(wire.call(1, "Join", changes={"content-length": "4"}))
        wire.send(frame(FrameType.DATA, 0, 1, b"\0\xff\xff\xff\xff"))
        assert await wire.error() == (1, ErrorCode.PROTOCOL_ERROR)
        await wire.echoes(3)


async def test_content_length_without_content_resets_the_stream(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, flags=END_STREAM, changes={"content-length": "7"}))
        assert await wire.error() == (1, ErrorCode.PROTOCOL_ERROR)
        await wire.echoes(3)


async def test_right_content_length_is_accepted(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, changes={"content-length": "7"}), wire.data(1, b"ab"))
        assert (await wire.answer(1))[0] == message(b"ab")


async def test_data_after_a_reset_is_an_error_while_the_handler_cleans_up(
    example: Example,
) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, "Tidy"), wire.data(1, b"", 0))
        await example.waiting.wait()
        wire.send(rst_stream(1, ErrorCode.CANCEL), frame(FrameType.DATA, 0, 1, b"late"))
        assert await wire.error() == (1, ErrorCode.STREAM_CLOSED)
        await wire.echoes(3)
        example.may_end.set()
        await example.tidied.wait()


async def test_headers_and_messages_span_frames(example: Example) -> None:
    async with wired(example) as wire:
        block = wire.block("Join")
        padded = b"\x02" + bytes(5) + block[:7] + b"\0\0"
        wire.send(frame(FrameType.HEADERS, PADDED | PRIORITY, 1, padded))
        wire.send(frame(FrameType.CONTINUATION, 0, 1, block[7:20]))
        wire.send(frame(FrameType.CONTINUATION, END_HEADERS, 1, block[20:]))
        data = message(b"one") + message(b"") + message(b"two")
        wire.send(frame(FrameType.DATA, PADDED, 1, b"\x03" + data[:3] + b"\0\0\0"))
        wire.send(frame(FrameType.DATA, 0, 1, data[3:12]), frame(FrameType.DATA, 0, 1))
        wire.send(frame(FrameType.DATA, END_STREAM, 1, data[12:]))
        assert (await wire.answer(1))[0] == message(b"onetwo")


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (message(b"abc", compressed=True), "identity", "13"),
        (message(b"abc", compressed=True), "snappy", "12"),
        (message(b"abc", compressed=True), "gzip", "13"),
        (message(zlib.compress(b"abc")[:-2], compressed=True), "deflate", "13"),
        (message(zlib.compress(bytes(MOST_BYTES + 1)), compressed=True), "deflate", "8"),
        (b"\0\xff\xff\xff\xff", "identity", "8"),
        (message(b"abc")[:-1], "identity", "13"),
        (b"", "identity", "12"),
    ],
)
async def test_invalid_message_ends_its_call(
    example: Example, data: bytes, encoding: str, status: str
) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, changes={"grpc-encoding": encoding}))
        wire.send(frame(FrameType.DATA, END_STREAM, 1, data))
        _, said = await wire.answer(1)
        assert said["grpc-status"] == status
        assert said["grpc-message"]
        await wire.echoes(3)
    assert len(example.contexts) == 1


async def test_oversized_metadata_ends_only_its_call(example: Example) -> None:
    async with wired(example) as wire:
        block = wire.block("Echo", {"much": "e" * 24_000})
        for start in range(0, len(block), 9000):
            kind = FrameType.CONTINUATION if start else FrameType.HEADERS
            flags = END_HEADERS if start + 9000 >= len(block) else 0
            wire.send(frame(kind, flags, 1, block[start : start + 9000]))
        _, said = await wire.answer(1)
        assert said["grpc-status"] == "8"
        await wire.echoes(3)


async def test_rst_stream_cancels_the_handler(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, "Wait"), wire.data(1, b""))
        wire.send(rst_stream(1, ErrorCode.CANCEL))
        await wire.echoes(3)
        wire.send(wire.call(5, "Wait"), wire.data(5, b""))
        await example.waiting.wait()
        wire.send(rst_stream(5, ErrorCode.CANCEL))
        await example.cancelled.wait()


async def test_handler_in_cleanup_is_not_cancelled_again(example: Example) -> None:
    """The deadline passes, the client resets the stream and disconnects."""
    async with wired(example) as wire:
        wire.send(wire.call(1, "Tidy", changes={"grpc-timeout": "50m"}), wire.data(1, b""))
        assert (await wire.answer(1))[1]["grpc-status"] == "4"
        wire.send(rst_stream(1, ErrorCode.CANCEL))
        await wire.echoes(3)
    async with wired(example) as wire:
        await wire.echoes(1)
    example.may_end.set()
    async with asyncio.timeout(60):
        await example.tidied.wait()


async def test_reset_calls_count_until_their_handlers_end(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmesh.chassis.grpc.server.connection.MAX_CONCURRENT_STREAMS", 2)
    async with wired(example) as wire:
        for stream in (1, 3):
            example.waiting.clear()
            wire.send(wire.call(stream, "Tidy"), wire.data(stream, b""))
            await example.waiting.wait()
            wire.send(rst_stream(stream, ErrorCode.CANCEL))
        wire.send(wire.call(5), wire.data(5, b""))
        assert await wire.error() == (5, ErrorCode.REFUSED_STREAM)
        example.may_end.set()
        await example.tidied.wait()
        await wire.echoes(7)


async def test_handlers_of_calls_reset_at_once_never_start(example: Example) -> None:
    async with wired(example) as wire:
        for stream in range(1, 801, 2):
            wire.send(wire.call(stream, "Wait", END_STREAM), rst_stream(stream, ErrorCode.CANCEL))
        await wire.echoes(801)
    assert not example.waiting.is_set()


async def test_second_message_on_a_single_request_ends_the_call(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, "Wait"), wire.data(1, b"one", 0))
        await example.waiting.wait()
        wire.send(wire.data(1, b"two", 0))
        _, said = await wire.answer(1)
        assert said["grpc-status"] == "13"
        await example.cancelled.wait()
        await wire.echoes(3)


async def test_joined_binary_metadata_is_split(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, changes={"data-bin": "AAE=, Ag,Aw=="}), wire.data(1, b""))
        await wire.answer(1)
    metadata = example.contexts[0].invocation_metadata()
    assert metadata == (("data-bin", b"\0\1"), ("data-bin", b"\2"), ("data-bin", b"\3"))


async def test_stream_errors_are_not_logged(
    example: Example, caplog: pytest.LogCaptureFixture
) -> None:
    """A client can cause them as fast as it sends."""
    caplog.set_level("INFO")
    async with wired(example) as wire:
        wire.send(wire.call(1, changes={"connection": "close"}))
        await wire.error()
        await wire.echoes(3)
    assert not caplog.records
