"""Items of an adapter that workers alone have, and evict."""

from __future__ import annotations

import asyncio

import pytest
from router.scripted import LENGTH, READY, ScriptedEngine, eventually, until_states
from router.scripted_fleet import FIELDS, Fleet, fleet, refusal
from trtmesh.chassis.errors import AdapterNotFound, Draining
from trtmesh.client import ItemResult
from trtmesh.router.requests import placer
from trtmesh.router.requests.item import ItemRun
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

NUMBER, VERSION = 7, "v1"
ABSENT = epb.ADAPTER_PLACE_ABSENT
ADAPTER = pb.LoraConfig(id=NUMBER)
PATIENT = {"worker_wait_seconds": 3600}
"""Longer than a test may take."""


def engines() -> list[ScriptedEngine]:
    return [ScriptedEngine(worker=w, supported_fields=[*FIELDS, "lora.id"]) for w in "ab"]


async def begun(on: Fleet) -> tuple[asyncio.Task[list[ItemResult]], epb.SubmitCommand]:
    """An item at the worker that alone has its adapter."""
    one, workers, key = on.engines[0], on.client.router._fleet, (NUMBER, VERSION)
    await one.tell_adapter(*key)
    await eventually(lambda: any(key in each.adapters.held for each in workers.snapshot()))
    asked = on.ask([5], adapter=ADAPTER)
    (submit,) = await one.submitted()
    return asked, submit


async def test_waiting_item_fails_once_all_ready_workers_evicted_its_adapter() -> None:
    one, two = engines()
    async with fleet(one, two, retries=PATIENT) as on:
        asked, submit = await begun(on)
        await one.tell_adapter(NUMBER, VERSION, place=ABSENT)
        await one.step(ends=[refusal(submit.handle, Draining("draining"))])
        (item,) = await asked
        assert isinstance(item.error, AdapterNotFound)
        assert "register it" in item.error.message


async def test_started_item_waits_for_a_worker_that_brings_its_adapter_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing but a change wakes it.
    monkeypatch.setattr(placer, "REPEAT_SECONDS", PATIENT["worker_wait_seconds"])
    one, two = engines()
    async with fleet(one, two, retries=PATIENT) as on:
        asked, submit = await begun(on)
        await one.step((submit.handle, 0, [6]))
        await one.hang_up()
        await eventually(lambda: len(one.hellos) == 2)
        await until_states(on.client, [READY, READY], [])
        await two.tell_adapter(NUMBER, VERSION)
        (moved,) = await two.submitted()
        assert list(moved.token_ids) == [5, 6]
        await two.step((moved.handle, 1, [7]), ends=[(moved.handle, LENGTH)])
        (item,) = await asked
        assert item.token_ids == (6, 7)


async def test_items_cancelled_before_their_turn_use_their_adapter_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a removed version would stay on its workers."""
    waiting: list[ItemRun] = []

    async def wait_for_ever(item: ItemRun) -> None:
        waiting.append(item)
        await asyncio.Event().wait()

    monkeypatch.setattr(ItemRun, "_turn", wait_for_ever)
    one, two = engines()
    async with fleet(one, two, retries=PATIENT) as on:
        workers, router, key = on.engines, on.client.router, (NUMBER, VERSION)
        await workers[0].tell_adapter(*key)
        await eventually(
            lambda: any(key in each.adapters.held for each in router._fleet.snapshot())
        )
        asked = on.ask([5], [6], adapter=ADAPTER)
        await eventually(lambda: len(waiting) == 2)
        asked.cancel()
        await eventually(lambda: not router._requests.live)
        assert router._adapters.usages.live(key) == 0
