"""Requests, stops and deadlines of the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from client.scripted import (
    ScriptedRouter,
    accepted,
    item_finished,
    one_token_and_no_time_left,
    one_token_then_silence,
    response,
    two_tokens_each,
)
from trtmesh.chassis.errors import (
    DeadlineExceeded,
    StreamIncomplete,
)
from trtmesh.client import (
    Accepted,
    Client,
    GenerationConfig,
    ItemFinished,
    Tokens,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2


async def test_stream_without_every_terminal_event_is_incomplete(
    router: ScriptedRouter, client: Client
) -> None:
    async def forgets_the_second(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield response(accepted(request), item_finished(0))

    router.script = forgets_the_second
    events = client.generate(["x", "y"])
    assert isinstance(await anext(events), Accepted)
    assert isinstance(await anext(events), ItemFinished)
    with pytest.raises(StreamIncomplete, match="item 1"):
        await anext(events)


async def test_leaving_early_cancels_the_call(router: ScriptedRouter, client: Client) -> None:
    router.script = one_token_then_silence
    async with aclosing(client.generate(["x"])) as events:
        async for event in events:
            if isinstance(event, Tokens):
                break
    await router.call_ended.wait()


async def test_cancelling_the_task_cancels_the_call(router: ScriptedRouter, client: Client) -> None:
    router.script = one_token_then_silence
    arrived = asyncio.Event()

    async def read() -> None:
        async for event in client.generate(["x"]):
            if isinstance(event, Tokens):
                arrived.set()

    task = asyncio.create_task(read())
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await router.call_ended.wait()


async def test_deadline_reaches_the_router(router: ScriptedRouter, client: Client) -> None:
    router.script = two_tokens_each
    await client.complete(["x"], timeout_seconds=300)
    assert router.time_remaining is not None
    # On the wire, a long timeout is rounded up to whole seconds.
    assert 0 < router.time_remaining <= 301


async def test_passed_deadline_raises(router: ScriptedRouter, client: Client) -> None:
    router.script = one_token_then_silence
    with pytest.raises(DeadlineExceeded, match=r"^request late .* within its timeout of 0.2 s: "):
        await client.complete(["x"], request_id="late", timeout_seconds=0.2)


async def test_deadline_noticed_by_the_router_raises_the_same_error(
    router: ScriptedRouter, client: Client
) -> None:
    router.script = one_token_and_no_time_left
    told = (
        "request late was not complete within its timeout of 300 s: 2 of its 2 items had not ended;"
        " allow more time, or ask for fewer tokens"
    )
    with pytest.raises(DeadlineExceeded, match=f"^{told}$"):
        await client.complete(["x", "y"], request_id="late", timeout_seconds=300)


async def test_missing_request_id_is_drawn(router: ScriptedRouter, client: Client) -> None:
    router.script = two_tokens_each
    await client.complete(["x"])
    await client.complete(["x"])
    await client.complete(["x"], request_id="mine", model="demo")
    first, second, third = router.requests
    assert first.request_id
    assert first.request_id != second.request_id
    assert (third.request_id, third.model) == ("mine", "demo")


async def test_stop_names_request_and_items(router: ScriptedRouter, client: Client) -> None:
    assert await client.stop("r1", [0, 2]) == 2
    assert router.stops == [router_pb2.StopRequest(request_id="r1", batch_indexes=[0, 2])]


async def test_request_carries_prompts_and_options(router: ScriptedRouter, client: Client) -> None:
    router.script = two_tokens_each
    own = router_pb2.GenerateItem(prompt=pb.Prompt(text="c"), config=GenerationConfig(priority=9))
    await client.complete(["a", [1, 2], pb.Prompt(text="b"), own], max_tokens=5, seed=0)
    (request,) = router.requests
    assert [item.prompt.WhichOneof("content") for item in request.items] == [
        "text", "token_ids", "text", "text",
    ]  # fmt: skip
    assert list(request.items[1].prompt.token_ids.ids) == [1, 2]
    assert request.items[3] == own
    assert request.config == GenerationConfig(
        stopping=pb.StoppingConfig(max_tokens=5), sampling=pb.SamplingConfig(seed=0)
    )
