"""A worker that says what it must not: it is left, named and counted, and its items continue elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from router.scripted import (
    LENGTH,
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_fleet import FIELDS
from trtmesh.chassis.errors import WorkerLost
from trtmesh.router.doors.triton.metrics import engine_figures
from trtmesh.router.fleet.assignments import LARGE_STEP_TOKENS
from trtmesh.router.fleet.worker_capabilities import MOST_BLOCKS
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

REFUSED = admin_pb.WORKER_STATE_REFUSED
TOKENS = 4
MEGABYTE = "x" * 2**20


def engine(name: str, **more: Any) -> ScriptedEngine:
    return ScriptedEngine(worker=name, supported_fields=FIELDS, max_batch_size=8, **more)


@asynccontextmanager
async def routed(*engines: ScriptedEngine, **settings: Any) -> AsyncIterator[RouterClient]:
    async with (
        serving_engine(engines[0]) as one,
        serving_engine(engines[1]) as two,
        serving_router([one, two], **settings) as client,
    ):
        yield client


Lie = Callable[[ScriptedEngine, int], Awaitable[None]]


async def more_tokens_than_asked_for(liar: ScriptedEngine, handle: int) -> None:
    await liar.step((handle, 1, [7] * TOKENS))


async def a_gap(liar: ScriptedEngine, handle: int) -> None:
    await liar.step((handle, 2, [7]))


async def a_step_of_millions(liar: ScriptedEngine, handle: int) -> None:
    await liar.step((handle, 1, [7] * 2_000_000))


async def many_tokens_of_nobody(liar: ScriptedEngine, handle: int) -> None:
    await liar.step((handle + 999, 0, [7] * (LARGE_STEP_TOKENS + 1)))


async def torn_lists(liar: ScriptedEngine, handle: int) -> None:
    step = epb.Step(handles=[handle], token_offsets=[1], token_counts=[2], token_ids=[7])
    await liar.send(epb.EngineEvent(step=step))


async def an_end_after_other_tokens(liar: ScriptedEngine, handle: int) -> None:
    end = epb.SequenceEnd(handle=handle, reason=LENGTH, generated_tokens=TOKENS)
    await liar.step(ends=[end])


async def an_end_before_any_token(liar: ScriptedEngine, handle: int) -> None:
    end = epb.SequenceEnd(handle=handle, reason=pb.FINISH_REASON_END_ID)
    await liar.send(epb.EngineEvent(step=epb.Step(ends=[end])))


async def loads_of_maximal_numbers(liar: ScriptedEngine, handle: int) -> None:
    del handle
    fields = epb.Load.DESCRIPTOR.fields
    numbers: dict[str, Any] = {f.name: 2**64 - 1 for f in fields if f.type == f.TYPE_UINT64}
    await liar.send(epb.EngineEvent(load=epb.Load(**numbers)))


async def many_sequences(liar: ScriptedEngine, handle: int) -> None:
    del handle
    await liar.send(epb.EngineEvent(load=epb.Load(running_sequences=2**32 - 1)))


async def no_number(liar: ScriptedEngine, handle: int) -> None:
    del handle
    await liar.send(epb.EngineEvent(load=epb.Load(busy_seconds=float("nan"))))


async def a_long_name(liar: ScriptedEngine, handle: int) -> None:
    del handle
    await liar.tell_adapter(7, "0", name=MEGABYTE)


@pytest.mark.parametrize(
    "lie",
    [
        more_tokens_than_asked_for,
        a_gap,
        a_step_of_millions,
        many_tokens_of_nobody,
        torn_lists,
        an_end_after_other_tokens,
        an_end_before_any_token,
        loads_of_maximal_numbers,
        many_sequences,
        no_number,
        a_long_name,
    ],
)
async def test_worker_that_lies_is_left_and_its_items_continue(lie: Lie) -> None:
    engines = engine("one"), engine("two")
    async with routed(*engines) as client:
        await until_states(client, [READY, READY], [])
        call = asyncio.create_task(client.complete([[1]], text=False, max_tokens=TOKENS))
        await eventually(lambda: any(each.submits for each in engines))
        liar, other = engines if engines[0].submits else engines[::-1]
        handle = liar.submits[0].handle
        await liar.step((handle, 0, [7]))
        await lie(liar, handle)
        (submit,) = await other.submitted()
        assert (list(submit.token_ids), submit.emitted_tokens) == ([1, 7], 1)
        await other.step((submit.handle, 1, [8, 9, 10]), ends=[(submit.handle, LENGTH)])
        (item,) = await call
        assert item.error is None
        assert item.token_ids == (7, 8, 9, 10)
        await until_states(client, [REFUSED, READY], [])
        (left,) = [w for w in (await client.status()).workers if w.state == REFUSED]
        assert left.worker == liar.description.worker
        assert "broke the contract" in left.problem
        assert len(left.problem) < 1000
        assert breaches(client) == 1
        assert len(liar.hellos) == 1


def breaches(client: RouterClient) -> float | None:
    name = "trtmesh_router_contract_breaches_total"
    return client.registry.get_sample_value(name, {"peer": "worker"})


@pytest.mark.parametrize(
    "description",
    [
        {"worker": MEGABYTE},
        {"model": MEGABYTE},
        {"supported_fields": [MEGABYTE]},
        {"end_ids": range(10_000)},
        {"max_batch_size": 2**32 - 1},
    ],
)
async def test_worker_with_an_impossible_description_is_refused(description: Any) -> None:
    async with routed(ScriptedEngine(**description), engine("two")) as client:
        await until_states(client, [REFUSED, READY], [])
        assert breaches(client) == 1


async def test_worker_that_does_not_end_a_stopped_sequence_is_left() -> None:
    one, two = engine("one"), engine("two")
    async with routed(one, two, deadlines={"queue_seconds": 1.0}) as client:
        await until_states(client, [READY, READY], [])
        call = asyncio.create_task(client.complete([[1]], text=False, max_tokens=TOKENS))
        await eventually(lambda: one.submits or two.submits)
        call.cancel()
        await until_states(client, [REFUSED, READY], [])
        assert client.gauge("worker_sequences") == 0
        assert breaches(client) == 1


async def test_only_worker_that_forgets_a_sequence_is_left() -> None:
    one = engine("one")
    async with (
        serving_engine(one) as address,
        serving_router(
            [address],
            deadlines={"queue_seconds": 1.0},
            retries={"worker_wait_seconds": 0.5},
        ) as client,
    ):
        await until_states(client, [READY], [])
        call = asyncio.create_task(client.complete([[1]], text=False, max_tokens=TOKENS))
        await one.submitted()
        await one.report(received_items=1)
        (item,) = await call
        assert isinstance(item.error, WorkerLost)
        assert "it reports no sequence" in item.error.message
        assert breaches(client) == 1


async def test_sums_of_large_loads_stay_readable() -> None:
    """Each is within the contract, and their sum outside of the field."""
    one, two = engine("one"), engine("two")
    async with routed(one, two) as client:
        await until_states(client, [READY, READY], [])
        for each in (one, two):
            await each.report(total_blocks=MOST_BLOCKS)
        workers = client.router._fleet.workers.values()
        await eventually(lambda: all(each.load.total_blocks for each in workers))
        assert engine_figures(workers).load.total_blocks == 2**32 - 1
