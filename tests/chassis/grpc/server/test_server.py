"""Calls of grpc.aio's client to the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example
from log_lines import LogLine
from trtmesh.chassis.rpc import REQUEST_ID_METADATA_KEY

LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SERVICE = "/example.Service/"


@asynccontextmanager
async def channel_to(example: Example, **options: Any) -> AsyncIterator[Any]:
    async with (
        asyncio.timeout(60),
        grpc.aio.insecure_channel(example.address, options=LIMITS, **options) as channel,
    ):
        yield channel


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_every_kind_of_call(example: Example) -> None:
    async with channel_to(example) as channel:
        assert await channel.unary_unary(SERVICE + "Echo")(b"one") == b"one"
        assert await channel.unary_unary(SERVICE + "Echo")(b"") == b""
        for name in ("Many", "Write"):
            many = channel.unary_stream(SERVICE + name)(b"3,2")
            assert [each async for each in many] == [b"\0\0", b"\1\1", b"\2\2"]
            assert [each async for each in channel.unary_stream(SERVICE + name)(b"0,0")] == []
        joined = channel.stream_unary(SERVICE + "Join")(iter([b"a", b"", b"bc"]))
        assert await joined == b"abc"
        chat = channel.stream_stream(SERVICE + "Chat")()
        for word in (b"ab", b"cd"):
            await chat.write(word)
            assert await chat.read() == word[::-1]
        await chat.done_writing()
        assert await chat.read() is grpc.aio.EOF
        assert await chat.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("size", [16_383, 16_384, 65_530, 65_536, 2**20 + 1, MOST_BYTES])
async def test_messages_of_any_size(example: Example, size: int) -> None:
    message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with channel_to(example) as channel:
        assert await channel.unary_unary(SERVICE + "Echo")(message) == message
        chat = channel.stream_stream(SERVICE + "Chat")(iter([message] * 2))
        assert [each async for each in chat] == [message[::-1]] * 2


async def test_oversized_message_ends_only_its_call(example: Example) -> None:
    async with channel_to(example) as channel:
        waiting = channel.unary_unary(SERVICE + "Wait")(b"")
        error = await refused(channel.unary_unary(SERVICE + "Echo")(bytes(MOST_BYTES + 1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"larger than max ({MOST_BYTES + 1} vs. {MOST_BYTES})" in str(error.details())
        many = channel.unary_stream(SERVICE + "Many")(b"1,%d" % (MOST_BYTES + 1))
        error = await refused(many.read())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(error.details()).startswith("Sent message larger than max")
        assert not waiting.done()
        waiting.cancel()


async def test_metadata_and_deadlines_reach_the_handler(example: Example) -> None:
    metadata = (("x-request-id", "r-7"), ("twice", "1"), ("twice", "2"), ("data-bin", b"\0\xff,"))
    async with channel_to(example) as channel:
        echo = channel.unary_unary(SERVICE + "Echo")
        await echo(b"", metadata=metadata, timeout=50)
        await echo(b"")
    with_deadline, without = example.contexts
    seen = [pair for pair in with_deadline.invocation_metadata() if pair[0] != "user-agent"]
    assert tuple(seen) == metadata
    # Clients round it up.
    assert 40 < with_deadline.time_remaining() < 60
    assert without.time_remaining() is None
    assert with_deadline.peer().startswith("ipv4:127.0.0.1:")


async def test_metadata_is_never_logged(example: Example, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with channel_to(example) as channel:
        metadata = (("authorization", "Bearer s3cret"), ("s3cret-bin", b"\xff"))
        await channel.unary_unary(SERVICE + "Echo")(b"", metadata=metadata)
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("details", ["plain", "100 % größer\nthan \x00 this: 東京", "x" * 9000])
async def test_status_details_and_trailing_metadata_reach_the_client(
    example: Example, details: str
) -> None:
    async with channel_to(example) as channel:
        error = await refused(channel.unary_unary(SERVICE + "Fail")(details.encode()))
    assert error.code() is grpc.StatusCode.DATA_LOSS
    told = str(error.details())
    assert told == details or (told.endswith("...") and details.startswith(told[:4000]))
    assert dict(error.trailing_metadata()) == {"reason": "OWN", "data-bin": b"\x00\xff"}


async def test_handler_exception_is_returned_and_logged(
    example: Example, logged: Callable[[], list[LogLine]]
) -> None:
    async with channel_to(example) as channel:
        metadata = ((REQUEST_ID_METADATA_KEY, "r-1"),)
        error = await refused(channel.unary_unary(SERVICE + "Fail")(b"defect", metadata=metadata))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "ZeroDivisionError: by zero"
        assert await channel.unary_unary(SERVICE + "Echo")(b"on") == b"on"
    assert logged() == [LogLine("r-1", "unexpected error in a call")]


async def test_handler_sets_a_status_and_raises(example: Example) -> None:
    """Like the default methods of a generated servicer."""
    async with channel_to(example) as channel:
        error = await refused(channel.unary_unary(SERVICE + "Fail")(b"status"))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNIMPLEMENTED, "not yet")


async def test_unknown_method_is_unimplemented(example: Example) -> None:
    async with channel_to(example) as channel:
        for path in (SERVICE + "Other", "/other.Service/Echo", "/"):
            error = await refused(channel.unary_unary(path)(b""))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_client_cancel_cancels_the_handler(example: Example) -> None:
    async with channel_to(example) as channel:
        waiting = channel.unary_unary(SERVICE + "Wait")(b"")
        await example.waiting.wait()
        waiting.cancel()
        await example.cancelled.wait()
        assert await channel.unary_unary(SERVICE + "Echo")(b"on") == b"on"


async def test_disconnect_cancels_the_handler(example: Example) -> None:
    async with channel_to(example) as channel:
        waiting = channel.unary_unary(SERVICE + "Wait")(b"")
        await example.waiting.wait()
    async with asyncio.timeout(60):
        await example.cancelled.wait()
    assert waiting.done()


async def test_deadline_ends_call_and_handler(example: Example) -> None:
    async with channel_to(example) as channel:
        error = await refused(channel.unary_unary(SERVICE + "Wait")(b"", timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await example.cancelled.wait()


async def test_invalid_trailing_metadata_ends_its_call(example: Example) -> None:
    async with channel_to(example) as channel:
        error = await refused(channel.unary_unary(SERVICE + "Misspell")(b""))
        assert error.code() is grpc.StatusCode.INTERNAL


async def test_handler_ends_before_its_client(example: Example) -> None:
    async with channel_to(example) as channel:
        first = channel.stream_unary(SERVICE + "First")()
        await first.write(b"one")
        assert await first == b"one"
        assert await channel.unary_unary(SERVICE + "Echo")(b"on") == b"on"


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_read(
    example: Example, compression: grpc.Compression
) -> None:
    message = b"again and " * 1000
    async with channel_to(example, compression=compression) as channel:
        assert await channel.unary_unary(SERVICE + "Echo")(message) == message
        error = await refused(channel.unary_unary(SERVICE + "Echo")(bytes(MOST_BYTES + 1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_slow_reader_pauses_the_handler(example: Example) -> None:
    """The handler resumes when the client reads; other calls of the connection continue."""
    async with channel_to(example) as channel:
        many = channel.unary_stream(SERVICE + "Many")(b"2000,16384")
        assert await many.read() == bytes(16384)
        seen = -1
        while seen != example.written:
            seen = example.written
            for _ in range(20):
                assert await channel.unary_unary(SERVICE + "Echo")(b"on") == b"on"
        assert seen < 1900
        count = 1
        while (message := await many.read()) is not grpc.aio.EOF:
            assert message == bytes((count % 251,)) * 16384
            count += 1
        assert count == 2000


async def test_hundreds_of_concurrent_calls(example: Example) -> None:
    async with channel_to(example) as channel:
        many = channel.unary_stream(SERVICE + "Many")

        async def read(number: int) -> int:
            return sum([len(each) async for each in many(b"20,%d" % number)])

        counts = await asyncio.gather(*map(read, range(300)))
        assert counts == [20 * number for number in range(300)]


async def test_stop_finishes_open_calls_and_refuses_new_ones(example: Example) -> None:
    async with channel_to(example) as channel:
        chat = channel.stream_stream(SERVICE + "Chat")()
        await chat.write(b"ab")
        assert await chat.read() == b"ba"
        stopping = asyncio.create_task(example.server.stop(grace=50))
        await asyncio.sleep(0)
        await chat.write(b"cd")
        assert await chat.read() == b"dc"
        assert not stopping.done()
        error = await refused(channel.unary_unary(SERVICE + "Echo")(b""))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await chat.done_writing()
        assert await chat.code() is grpc.StatusCode.OK
        await stopping
    assert await example.server.wait_for_termination() is False


async def test_stop_without_grace_ends_calls_as_unavailable(example: Example) -> None:
    async with channel_to(example) as channel:
        waiting = channel.unary_unary(SERVICE + "Wait")(b"")
        await example.waiting.wait()
        await example.server.stop(grace=None)
        assert (await refused(waiting)).code() is grpc.StatusCode.UNAVAILABLE
        assert example.cancelled.is_set()


async def test_port_in_use_is_refused_and_a_name_binds_all_its_addresses(example: Example) -> None:
    with pytest.raises(RuntimeError, match="in use"):
        example.server.add_insecure_port(example.address)
    port = example.server.add_insecure_port("localhost:0")
    await example.server.start()
    example.address = f"127.0.0.1:{port}"
    async with channel_to(example) as channel:
        assert await channel.unary_unary(SERVICE + "Echo")(b"on") == b"on"
