"""Two routers over the same workers, before reports show each other's placements."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from router.scripted import (
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from trtmesh.router.placement import load_guard
from trtmesh.v1 import generation_pb2 as pb

PREFIXES = 12


async def test_routers_place_a_new_prefix_on_the_same_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Keeps the workers' ages equal for both routers.
    monkeypatch.setattr(load_guard, "SLOW_START_SECONDS", 3600.0)
    engines = [
        ScriptedEngine(worker=name, supported_fields=["stopping.max_tokens"], tokens_per_block=4)
        for name in "abcdef"
    ]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving_engine(each)) for each in engines]
        routers = []
        for _ in range(2):
            router = await stack.enter_async_context(
                serving_router(
                    addresses,
                    placement={"policy": "prefix_aware"},
                    # A slow moment would take a worker out of one router's choice.
                    deadlines={"step_gap_seconds": 3600, "silence_seconds": 3600},
                )
            )
            await until_states(router, [READY] * len(engines), [])
            routers.append(router)
        await take_a_turn(routers[1], engines)
        homes: list[list[str]] = []
        for number in range(PREFIXES):
            names = [f"{number} of {router.address}" for router in routers]
            for name, router in zip(names, routers, strict=True):
                asked = router.complete([[number] * 9], request_id=name, text=False)
                stack.callback(asyncio.create_task(asked).cancel)
            homes.append([await home(name, engines) for name in names])
        assert all(first == second for first, second in homes)
        # Bookings outweigh the prefix's hash.
        chosen = [first for first, _ in homes]
        assert {chosen.count(engine.description.worker) for engine in engines} == {2}


async def take_a_turn(router: RouterClient, engines: list[ScriptedEngine]) -> None:
    """Gives this router's workers other turns than those of a fresh router."""
    asked = asyncio.create_task(router.complete([[1]], request_id="withdrawn", text=False))
    worker = await home("withdrawn", engines)
    (engine,) = (each for each in engines if each.description.worker == worker)
    asked.cancel()
    await eventually(lambda: engine.stops)
    await engine.step(ends=[(engine.submits[0].handle, pb.FINISH_REASON_STOPPED)])
    await eventually(lambda: not router.gauge("worker_bookings"))


async def home(request_id: str, engines: list[ScriptedEngine]) -> str:
    """The worker of a request."""

    def has_it(engine: ScriptedEngine) -> bool:
        return any(submit.request_id == request_id for submit in engine.submits)

    await eventually(lambda: any(map(has_it, engines)))
    return next(engine.description.worker for engine in engines if has_it(engine))
