"""Unread beams stay on the worker, only their latest state waits, and all that waits has a sum."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from process_constants import patch
from router.scripted import (
    LENGTH,
    READY,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from trtmesh.chassis.error_wire import REASON_METADATA_KEY
from trtmesh.chassis.errors import SlowClient
from trtmesh.chassis.fair.limits import Budget
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.streams.client_stream import ClientStream, Pace, WriteScheduler
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

FIXED_WINDOW = [("grpc.http2.bdp_probe", 0)]
TOKENS = 20_000
"""Tokens of a state of the search: two states fill the connection's buffers."""
REWRITES = 30

Call = grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]


@asynccontextmanager
async def unread_search(**settings: Any) -> AsyncIterator[tuple[ScriptedEngine, Call]]:
    """A search of two beams with an unread stream."""
    engine = ScriptedEngine(supported_fields=["beam_search.beam_width", "stopping.max_tokens"])
    config = pb.GenerationConfig(
        beam_search=pb.BeamSearchConfig(beam_width=2),
        stopping=pb.StoppingConfig(max_tokens=2 * TOKENS),
        output=pb.OutputConfig(text=False),
    )
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2]))
    request = router_pb2.GenerateRequest(
        request_id="search", items=[router_pb2.GenerateItem(prompt=prompt)], config=config
    )
    with pytest.MonkeyPatch.context() as patching:
        patch(patching, client_unread_seconds=3600)
        async with searched(engine, request, **settings) as call:
            yield engine, call


@asynccontextmanager
async def searched(
    engine: ScriptedEngine, request: router_pb2.GenerateRequest, **settings: Any
) -> AsyncIterator[Call]:
    async with serving_engine(engine) as address, serving_router([address], **settings) as client:
        await until_states(client, [READY], [])
        async with grpc.aio.insecure_channel(client.address, options=FIXED_WINDOW) as channel:
            call = router_pb2_grpc.MeshServiceStub(channel).Generate(request)
            await engine.submitted()
            yield call
            call.cancel()


async def rewrite(engine: ScriptedEngine, number: int) -> None:
    """A step that rewrites every beam."""
    handle = engine.submits[0].handle
    await engine.step(
        (handle, 0, [1000 + number] * TOKENS), (handle + 1, 0, [2000 + number] * TOKENS)
    )


async def test_waiting_beams_are_replaced_and_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    # At most two beams wait, a third of the limit, despite the rewrites.
    patch(monkeypatch, buffer_tokens=8_000)
    async with unread_search() as (engine, call):
        for number in range(REWRITES):
            await rewrite(engine, number)
        handle = engine.submits[0].handle
        await engine.step(ends=[(handle, LENGTH), (handle + 1, LENGTH)])
        beams: dict[int, list[int]] = {0: [], 1: []}
        messages = 0
        last = None
        async for response in call:
            messages += 1
            for event in response.events:
                if event.HasField("tokens"):
                    del beams[event.sequence_index][event.tokens.token_offset :]
                    beams[event.sequence_index] += event.tokens.token_ids
                last = event
        assert beams == {
            0: [1000 + REWRITES - 1] * TOKENS,
            1: [2000 + REWRITES - 1] * TOKENS,
        }
        assert last
        assert last.item_finished.reason == pb.FINISH_REASON_LENGTH
        assert messages < REWRITES
        assert not engine.stops
        assert len(engine.submits) == 1


async def test_sixteen_credits_waiting_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, buffer_tokens=1_000)
    async with unread_search() as (engine, call):
        number = 0
        while not engine.stops:
            await rewrite(engine, number := number + 1)
        await eventually(lambda: len(engine.stops) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as told:
            async for _ in call:
                pass
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(told.value.trailing_metadata())[REASON_METADATA_KEY] == "SLOW_CLIENT"


async def test_waiting_output_of_all_clients_has_a_sum() -> None:
    async with unread_search(client={"total_bytes": 100_000}) as (engine, call):
        number = 0
        while not engine.stops:
            await rewrite(engine, number := number + 1)
        with pytest.raises(grpc.aio.AioRpcError) as told:
            async for _ in call:
                pass
        assert dict(told.value.trailing_metadata())[REASON_METADATA_KEY] == "SLOW_CLIENT"
        assert "100000 bytes of all clients (client.total_bytes)" in str(told.value.details())


class Reader:
    """A client of a request, and why the request ended."""

    def __init__(self, budget: Budget) -> None:
        self.stream = ClientStream(router_pb2.GenerateEvent(), WriteScheduler())
        self.ends: list[SlowClient] = []
        self.pace = Pace(budget, self.stream, RouterMetrics(), lambda: None, self.ends.append)
        self.stream.watcher = self.pace
        self._offset = 0

    def put_logits(self, size: int) -> None:
        details = pb.TokenDetails(generation_logits=pb.Tensor(data=bytes(size)))
        self.stream.put_tokens(0, 0, self._offset, [7], "", details)
        self._offset += 1


async def test_the_client_that_leaves_most_is_ended() -> None:
    budget = Budget(100_000)
    small, large = Reader(budget), Reader(budget)
    for _ in range(2):
        large.put_logits(30_000)
    small.put_logits(35_000)
    await asyncio.sleep(0)
    assert (small.ends, large.ends) == ([], [])
    small.put_logits(5_000)
    # Room is made at once: what follows ends no other.
    assert budget.held < 50_000
    small.put_logits(5_000)
    await asyncio.sleep(0)
    assert (small.ends, len(large.ends)) == ([], 1)
    await small.stream.next_entries()
    assert budget.held == 0
    small.put_logits(5_000)
    small.pace.close()
    assert budget.held == 0
