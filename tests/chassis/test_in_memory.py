"""Calls within a process end, wait and fail as calls over a connection do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from trtmesh.chassis.error_wire import from_status
from trtmesh.chassis.errors import QueueFull, Unavailable
from trtmesh.chassis.grpc.client import Method
from trtmesh.chassis.grpc.client.call import CallEnded
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.in_memory import UNREAD_MESSAGES, InMemoryConnection

ECHO: Method[str, str] = Method("/test.Service/Echo", str.encode, str)
HALF: Method[int, int] = Method("/test.Service/Half", lambda _: b"", int)
SECONDS = 30.0

Stream = Callable[[AsyncIterator[str], Any], Awaitable[None]]


def connection(echo: Stream | None = None) -> InMemoryConnection:
    """To a server with a method of streams and one of single messages."""
    server = GrpcServer(1024)
    server.add_registered_method_handlers(
        "test.Service",
        {
            "Echo": grpc.stream_stream_rpc_method_handler(echo or _echo),
            "Half": grpc.unary_unary_rpc_method_handler(_half),
        },
    )
    return InMemoryConnection(server)


async def _echo(requests: AsyncIterator[str], context: Any) -> None:
    async for request in requests:
        await context.write(request.upper())


async def _half(request: int, context: Any) -> int:
    if context.time_remaining() is None:
        raise AssertionError("the handler knows no deadline")
    if request < 0:
        await asyncio.get_running_loop().create_future()
    return request // 2


async def test_messages_go_both_ways_in_order() -> None:
    call = connection().open(ECHO)
    try:
        for text in ("a", "b", "c"):
            await call.write(text)
            assert await call.read() == text.upper()
        await call.write("last")
        call.half_close()
        assert [each async for each in call] == ["LAST"]
        with pytest.raises(CallEnded):
            await call.write("late")
    finally:
        call.cancel()


async def test_messages_are_passed_on_at_once() -> None:
    received: list[str] = []
    writing = asyncio.Event()

    async def count(requests: AsyncIterator[str], context: Any) -> None:
        await context.write("0")
        async for request in requests:
            assert context.write_now(request)
            assert received[-1] == request
            writing.set()
        if len(received) > 3:
            raise QueueFull("enough")

    call = connection(count).open(ECHO)
    reading = asyncio.create_task(call.each(received.append))
    for text in ("1", "2", "3"):
        writing.clear()
        await asyncio.sleep(0)
        await call.write(text)
        await writing.wait()
    call.half_close()
    with pytest.raises(grpc.aio.AioRpcError, match="enough"):
        await reading
    assert received == ["0", "1", "2", "3"]


async def test_error_of_a_receiver_reaches_it_and_not_the_sender() -> None:
    def receive(text: str) -> None:
        raise ZeroDivisionError(text)

    call = connection().open(ECHO)
    reading = asyncio.create_task(call.each(receive))
    await asyncio.sleep(0)
    await call.write("a")
    with pytest.raises(ZeroDivisionError, match="A"):
        await reading
    call.cancel()


async def test_sender_waits_for_its_reader() -> None:
    written: list[str] = []
    call = connection().open(ECHO)

    async def send() -> None:
        for number in range(100):
            await call.write(str(number))
            written.append(str(number))

    sending = asyncio.create_task(send())
    try:
        for _ in range(50):
            await asyncio.sleep(0)
        # Both ways, and one in the handler's hands.
        assert len(written) == 2 * UNREAD_MESSAGES + 1
        assert [await call.read() for _ in range(100)] == [str(each) for each in range(100)]
        await sending
    finally:
        sending.cancel()
        call.cancel()


async def test_error_reaches_the_client_with_its_fields() -> None:
    async def refuse(requests: AsyncIterator[str], context: Any) -> None:
        raise QueueFull("too many", retry_after_ms=700)

    call = connection(refuse).open(ECHO)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        found = refused.value
        error = from_status(found.code(), found.details() or "", found.trailing_metadata())
        assert isinstance(error, QueueFull)
        assert (error.message, error.retry_after_ms) == ("too many", 700)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.write("late")
    finally:
        call.cancel()


async def test_defect_of_a_handler_is_a_status() -> None:
    async def break_down(requests: AsyncIterator[str], context: Any) -> None:
        await context.write("one")
        raise ZeroDivisionError("nothing to divide by")

    call = connection(break_down).open(ECHO)
    try:
        assert await call.read() == "one"
        with pytest.raises(grpc.aio.AioRpcError, match="ZeroDivisionError"):
            await call.read()
    finally:
        call.cancel()


async def test_cancelled_call_ends_its_handler() -> None:
    ended = asyncio.Event()

    async def wait(requests: AsyncIterator[str], context: Any) -> None:
        try:
            await context.write("begun")
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    call = connection(wait).open(ECHO)
    assert await call.read() == "begun"
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0)
    call.cancel()
    async with asyncio.timeout(SECONDS):
        await ended.wait()
        with pytest.raises(grpc.aio.AioRpcError, match="CANCELLED"):
            await reading


async def test_unary_call_has_a_deadline() -> None:
    on = connection()
    assert await on.ask(HALF, 8, SECONDS) == 4
    with pytest.raises(Unavailable, match="did not respond"):
        await on.ask(HALF, -1, 0.01)


async def test_unknown_method_is_unavailable() -> None:
    unknown: Method[str, str] = Method("/test.Service/Other", str.encode, str)
    with pytest.raises(Unavailable, match=r"/test\.Service/Other"):
        connection().open(unknown)
