"""Explain, and a change of policy on a running router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from router.scripted import (
    LENGTH,
    READY,
    RouterClient,
    ScriptedEngine,
    serving_engine,
    serving_router,
    until_states,
)
from trtmesh.chassis.errors import InvalidField, NotFound


@asynccontextmanager
async def two_workers(
    policy: str,
) -> AsyncIterator[tuple[RouterClient, list[ScriptedEngine]]]:
    fields = ["stopping.max_tokens"]
    engines = [ScriptedEngine(worker=name, supported_fields=fields) for name in "ab"]
    async with (
        serving_engine(engines[0]) as first,
        serving_engine(engines[1]) as second,
        serving_router([first, second], placement={"policy": policy}) as client,
    ):
        await until_states(client, [READY, READY], [])
        yield client, engines


async def test_explain_lists_every_placement_and_set_policy_applies_at_once() -> None:
    async with two_workers("round_robin") as (client, engines):
        reader = client.generate([[1, 2], [3, 4, 5]], request_id="r", text=False, max_tokens=9)
        await anext(reader)
        told = await client.admin.explain("r")
        assert [p.batch_index for p in told.placements] == [0, 1]
        assert [p.prompt_tokens for p in told.placements] == [2, 3]
        assert {p.worker for p in told.placements} == {"a", "b"}
        for placement in told.placements:
            assert (placement.policy, placement.cause) == ("round_robin", "first")
            assert {c.worker for c in placement.candidates} == {"a", "b"}
            assert not any(c.excluded_by for c in placement.candidates)
        assert [usage.prompt_tokens for usage in told.usages] == [2, 3]

        answer = await client.admin.set_policy("least_loaded")
        assert answer.previous == "round_robin"
        got = await client.admin.get_policy()
        assert got.policy == "least_loaded"
        assert {"auto", "prefix_aware", "power_of_two"} < set(got.available)
        with pytest.raises(InvalidField) as refused:
            await client.admin.set_policy("fastest")
        assert refused.value.fields == ("policy",)

        for engine in engines:
            (submit,) = await engine.submitted()
            await engine.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])
        async for _ in reader:
            pass
        told = await client.admin.explain("r")
        assert len(told.placements) == 2
        assert not told.usages
        with pytest.raises(NotFound):
            await client.admin.explain("other")
