"""Errors of handlers, and health, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from log_lines import LogLine
from trtmesh.chassis import rpc
from trtmesh.chassis.error_wire import REASON_METADATA_KEY
from trtmesh.chassis.errors import ModelNotFound, QueueFull
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.health import Health
from trtmesh.chassis.logs import Occasionally, rebind_request_id
from trtmesh.chassis.rpc import REQUEST_ID_METADATA_KEY, request_id_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Body = Callable[[Any], Awaitable[bytes]]


@asynccontextmanager
async def calling(body: Body) -> AsyncIterator[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]:
    """A method whose handler runs `body`."""

    async def handle(request: bytes, context: Any) -> bytes:
        return await body(context)

    server = GrpcServer(2**20)
    handlers: dict[str, Any] = {"Do": grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("example.Service", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.unary_unary("/example.Service/Do")
    finally:
        await server.stop(grace=None)


async def failure(body: Body) -> grpc.aio.AioRpcError:
    async with calling(body) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        return caught.value


async def test_domain_error_becomes_its_status_and_reason() -> None:
    async def body(context: Any) -> bytes:
        raise QueueFull("the queue is full")

    error = await failure(body)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "the queue is full"
    assert dict(error.trailing_metadata())[REASON_METADATA_KEY] == "QUEUE_FULL"


async def test_unexpected_error_becomes_internal_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(context: Any) -> bytes:
        raise ZeroDivisionError("by zero")

    error = await failure(body)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert dict(error.trailing_metadata())[REASON_METADATA_KEY] == "INTERNAL"
    assert "unexpected error" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_rebound_request_id_is_logged_with_the_refusal(
    logged: Callable[[], list[LogLine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have used up the line of this second.
    monkeypatch.setattr(rpc, "occasionally", Occasionally(rpc.log))

    async def body(context: Any) -> bytes:
        rebind_request_id("r-drawn")
        rebind_request_id("")
        raise ModelNotFound("nobody serves it")

    await failure(body)
    assert logged() == [LogLine("r-drawn", "call refused: MODEL_NOT_FOUND: nobody serves it")]


async def test_handler_abort_passes_through() -> None:
    async def body(context: Any) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "own")
        return b""

    assert (await failure(body)).code() is grpc.StatusCode.DATA_LOSS


async def test_cancellation_reaches_the_handler() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def body(context: Any) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b""

    async with calling(body) as call:
        running = call(b"")
        async with asyncio.timeout(60):
            await begun.wait()
            running.cancel()
            await ended.wait()


async def test_request_id_comes_from_the_metadata() -> None:
    async def body(context: Any) -> bytes:
        return request_id_of(context).encode()

    async with calling(body) as call:
        assert await call(b"", metadata=((REQUEST_ID_METADATA_KEY, "r-7"),)) == b"r-7"
        assert await call(b"") == b""


class TestHealth:
    async def test_process_serves_while_all_components_are_healthy(self) -> None:
        health = Health(["example.Service"])
        server = GrpcServer(2**20)
        await health.register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def statuses() -> set[int]:
                requests = [
                    health_pb2.HealthCheckRequest(service=s) for s in ("", "example.Service")
                ]
                return {(await stub.Check(request)).status for request in requests}

            assert await statuses() == {NOT_SERVING}
            await health.unwell("model", "loading")
            await health.well("start")
            assert await statuses() == {NOT_SERVING}
            assert health.problems == {"model": "loading"}
            await health.well("model")
            await health.well("never mentioned")
            assert await statuses() == {SERVING}
            await health.unwell("progress", "stuck")
            assert await statuses() == {NOT_SERVING}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="unknown"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await server.stop(grace=None)
