"""Ended calls and connections are freed by reference counting: services rarely run the garbage collector."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from chassis.grpc.client.scripted_server import PATIENCE_SECONDS, method
from chassis.grpc.server.conftest import MOST_BYTES, Example
from leaks import alive, gone, without_collector
from trtmesh.chassis.grpc.client import ClientCall, ClientConnection, connected


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    with without_collector():
        yield


async def _answered(connection: ClientConnection, example: Example) -> None:
    await connection.ask(method("Echo"), b"", PATIENCE_SECONDS)


async def _failed(connection: ClientConnection, example: Example) -> None:
    try:
        await connection.ask(method("Fail"), b"x", PATIENCE_SECONDS)
    except grpc.aio.AioRpcError:
        return
    raise AssertionError("it fails")


async def _cancelled(connection: ClientConnection, example: Example) -> None:
    call = connection.open(method("Wait"))
    await call.write(b"")
    await example.waiting.wait()
    call.cancel()


async def _left_behind(connection: ClientConnection, example: Example) -> None:
    connection.open(method("Wait"))


@pytest.mark.parametrize("use", [_answered, _failed, _cancelled, _left_behind])
async def test_ended_calls_and_connections_are_freed(
    example: Example, use: Callable[[ClientConnection, Example], Awaitable[None]]
) -> None:
    async with connected(example.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        await use(connection, example)
        if use is not _left_behind:
            assert not alive(ClientCall)
    del connection
    await gone(ClientConnection, ClientCall)


@pytest.mark.parametrize("passes", range(8))
async def test_cancelled_connection_is_freed(example: Example, passes: int) -> None:
    defects: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: defects.append(context))

    async def connect() -> None:
        async with connected(example.address, MOST_BYTES, PATIENCE_SECONDS):
            await asyncio.Event().wait()

    connecting = asyncio.create_task(connect())
    for _ in range(passes):
        await asyncio.sleep(0)
    connecting.cancel()
    await asyncio.wait([connecting])
    del connecting
    await gone(ClientConnection)
    assert defects == []
