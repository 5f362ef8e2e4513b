"""What a link tells of a peer that ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc_server import GrpcServer
from trtmesh.router.replica import send


async def refuse(requests: AsyncIterator[bytes], context: Any) -> None:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not this one")


async def leave(requests: AsyncIterator[bytes], context: Any) -> None:
    return


@pytest.mark.parametrize(
    ("handler", "error", "words"),
    [(refuse, grpc.aio.AioRpcError, "not this one"), (leave, Unavailable, "its stream ended")],
)
async def test_who_writes_to_an_ended_call_is_told_its_end(
    handler: Any, error: type[Exception], words: str
) -> None:
    server = GrpcServer(2**20)
    handlers: dict[str, Any] = {"Talk": grpc.stream_stream_rpc_method_handler(handler)}
    server.add_registered_method_handlers("example.Service", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream("/example.Service/Talk")()
            await call.code()
            with pytest.raises(error, match=words):
                await send(call, b"late")
    finally:
        await server.stop(grace=None)
