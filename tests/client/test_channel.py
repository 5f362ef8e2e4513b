"""Errors of the SDK's calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from chaos.proxy import proxy_to
from client.scripted import (
    ScriptedRouter,
    one_token_then_silence,
    response,
    two_tokens_each,
)
from trtmesh.chassis.error_wire import REASON_METADATA_KEY
from trtmesh.chassis.errors import (
    ERROR_TABLE,
    ErrorRow,
    TrtmeshError,
    Unavailable,
)
from trtmesh.client import (
    Client,
)
from trtmesh.v1 import router_pb2


@pytest.mark.parametrize("row", ERROR_TABLE, ids=lambda row: row.reason)
async def test_failed_call_raises_the_error_of_its_reason(
    router: ScriptedRouter, client: Client, row: ErrorRow
) -> None:
    async def refuses(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        context.set_trailing_metadata(((REASON_METADATA_KEY, row.reason),))
        await context.abort(row.status, "top_k is -1")
        yield response()

    router.script = refuses
    with pytest.raises(row.error) as caught:
        await client.complete(["x"])
    assert type(caught.value) is row.error
    assert caught.value.message == "top_k is -1"


async def test_status_without_a_reason_raises_the_error_of_the_status(
    router: ScriptedRouter, client: Client
) -> None:
    async def plain(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "a proxy said so")
        yield response()

    router.script = plain
    with pytest.raises(Unavailable, match="a proxy said so"):
        await client.complete(["x"])


async def test_call_cancelled_by_the_router_raises_an_error(
    router: ScriptedRouter, client: Client
) -> None:
    async def cancels(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        await context.abort(grpc.StatusCode.CANCELLED, "gone")
        yield response()

    router.script = cancels
    with pytest.raises(TrtmeshError, match="gone"):
        await client.complete(["x"])


async def test_closed_client_ends_its_calls_with_an_error(
    router: ScriptedRouter, client: Client
) -> None:
    router.script = one_token_then_silence
    async with Client(client.address) as short_lived:
        events = short_lived.generate(["x"])
        await anext(events)
        await anext(events)
        reading = asyncio.ensure_future(anext(events))
        # One turn of the loop, so that the read is under way when the client closes.
        await asyncio.sleep(0)
    with pytest.raises(TrtmeshError, match="closed"):
        await reading


async def test_unreachable_router_is_unavailable() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.complete(["x"])
        with pytest.raises(Unavailable):
            await client.stop("r")


@pytest.mark.parametrize("routers", [1, 2])
async def test_distant_router_is_waited_for(
    router: ScriptedRouter, client: Client, routers: int
) -> None:
    router.script = two_tokens_each
    async with proxy_to(client.address) as proxy:
        proxy.delay(0.2)
        async with Client([proxy.address] * routers, resume_seconds=0) as far:
            (item,) = await far.complete(["x"])
            assert item.reason is not None


async def test_unopened_client_explains_how_to_open_it() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client().complete(["x"])
