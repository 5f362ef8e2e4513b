"""Results folded from events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from client.scripted import (
    Event,
    ScriptedRouter,
    accepted,
    item_finished,
    response,
    sequence_finished,
    tokens,
)
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    PromptTooLong,
    StreamIncomplete,
)
from trtmesh.client import (
    Client,
    FinishReason,
    Usage,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2


async def test_complete_folds_by_item_and_sequence(router: ScriptedRouter, client: Client) -> None:
    async def script(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        started = router_pb2.ItemStarted(seed=7, prompt_tokens=3, worker="engine-0")
        error = to_proto(PromptTooLong("9 tokens", worker="engine-1"))
        failed = router_pb2.ItemFailed(error=error, usage=pb.Usage(prompt_tokens=9))
        yield response(
            accepted(request),
            Event(batch_index=0, item_started=started),
            tokens(0, 0, [1, 2], "ab"),
            tokens(0, 0, [5], "x", sequence=1),
            Event(batch_index=1, item_failed=failed),
            tokens(0, 2, [3], "c"),
            tokens(0, 3, [], "!"),
            sequence_finished(0),
            sequence_finished(0, sequence=1),
            item_finished(0),
        )

    router.script = script
    good, bad = await client.complete(["x", "y"])
    assert (good.text, good.token_ids, good.reason) == ("abc!", (1, 2, 3), FinishReason.LENGTH)
    assert (good.error, good.usage) == (None, Usage(3, 0, 2))
    assert good.started is not None
    assert (good.started.seed, good.started.worker) == (7, "engine-0")
    assert good.sequences[1].text == "x"
    assert good.sequences[1].reason is FinishReason.LENGTH
    assert isinstance(bad.error, PromptTooLong)
    assert (bad.error.message, bad.error.worker) == ("9 tokens", "engine-1")
    assert (bad.reason, bad.text, bad.usage) == (FinishReason.ERROR, "", Usage(9, 0, 0))


async def test_lower_offset_replaces_later_chunks(router: ScriptedRouter, client: Client) -> None:
    async def rewrites(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield response(tokens(0, 0, [1], "a"), tokens(0, 1, [2], "b"), tokens(0, 2, [3], "c"))
        yield response(tokens(0, 1, [7, 8], "xy"), item_finished(0))

    router.script = rewrites
    (result,) = await client.complete(["x"])
    assert (result.text, result.token_ids) == ("axy", (1, 7, 8))


async def test_missing_tokens_raise(router: ScriptedRouter, client: Client) -> None:
    async def skips(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield response(tokens(0, 0, [1], "a"), tokens(0, 2, [3], "c"), item_finished(0))

    router.script = skips
    with pytest.raises(StreamIncomplete, match="offset 2 after 1"):
        await client.complete(["x"])
