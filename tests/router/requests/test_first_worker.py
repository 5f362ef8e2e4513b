"""Requests before any worker has joined: of a model that the settings name they wait, as long and as many as the
settings say; others are refused."""

from __future__ import annotations

import asyncio

import pytest
from router.scripted import LENGTH, ScriptedEngine, eventually, serving_engine, serving_router
from trtmesh.chassis.errors import NoWorker, QueueFull


@pytest.mark.parametrize("model", ["", "m"])
async def test_request_waits_for_the_first_worker_of_a_named_model(model: str) -> None:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    retries = {"worker_wait_seconds": 3600}
    async with (
        serving_engine(engine) as address,
        serving_router(
            [], models=("m",), retries=retries, admission={"max_running_items": 1, "max_queued_items": 1}
        ) as client,
    ):  # fmt: skip
        asked = [
            asyncio.create_task(client.complete([[5]], model=model, text=False)) for _ in range(2)
        ]
        # What an autoscaler sees.
        await eventually(lambda: client.registry.get_sample_value(
            "trtmesh_router_waiting_sequences", {"model": "m"}))  # fmt: skip
        await eventually(lambda: client.gauge("live_requests") == 2)
        with pytest.raises(QueueFull):
            await client.complete([[5]], model=model, text=False)
        await client.admin.add_worker(address)
        for number in range(2):
            submit = (await engine.submitted(number + 1))[number]
            await engine.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])
        for (item,) in await asyncio.gather(*asked):
            assert (item.error, item.token_ids) == (None, (7,))


async def test_wait_for_the_first_worker_ends() -> None:
    async with serving_router([], models=("m",), retries={"worker_wait_seconds": 0.1}) as client:
        (item,) = await client.complete([[5]], text=False)
        assert isinstance(item.error, NoWorker)
        assert client.gauge("requests_total", model="m", door="native", outcome="failed") == 1


@pytest.mark.parametrize("models", [(), ("m",)])
async def test_request_of_a_model_that_nobody_names_is_refused(models: tuple[str, ...]) -> None:
    retries = {"worker_wait_seconds": 3600}
    async with serving_router([], models=models, retries=retries) as client:
        with pytest.raises(NoWorker):
            await client.complete([[5]], model="other", text=False)
