"""Repetitions by unlike workers and by workers that fail: they rest nobody, and end."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from router.handoff_fleet import Workers, workers
from router.scripted import eventually
from trtmesh.router.canary.canary import MOST_ATTEMPTS
from trtmesh.v1 import router_admin_pb2 as admin_pb

CANARY: dict[str, Any] = {
    "settings": {"canary_share": 1.0, "placement": {"policy": "round_robin"}},
    "timing": {"step_ms": 0.0},
}
PROMPT = list(range(100, 250))
SHORT: dict[str, Any] = {"limits": {"max_sequence_tokens": 40}}


async def examined(on: Workers) -> dict[str, float]:
    """What became of the samples, once none is left."""
    await eventually(lambda: not on.client.gauge("live_items"))
    await eventually(lambda: not on.client.gauge("canary_waiting"))
    return {
        outcome: count
        for outcome in ("identical", "different", "dropped", "unfit", "inexact", "failed")
        if (count := on.counted("canary_items", outcome=outcome))
    }


@pytest.mark.parametrize("short", [(1,), (0,), (1, 2), (0, 1)])
async def test_worker_with_a_shorter_limit_repeats_nothing_beyond_it(
    short: tuple[int, ...],
) -> None:
    of_worker = {f"mixed-{number}": SHORT for number in short}
    async with workers("mixed", "mixed", "mixed", of_worker=of_worker, **CANARY) as on:
        for number in range(12):
            await on.ask([*PROMPT[:20], number], max_tokens=60, ignore_end_id=True)
        found = await examined(on)
        assert found.keys() <= {"identical", "dropped"}
        assert found["identical"] >= 1
        states = {each.state for each in (await on.client.admin.list_workers()).workers}
        assert states == {admin_pb.WORKER_STATE_READY}


async def test_sample_that_workers_fail_with_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    small = {"kv_cache": {"total_blocks": 10}}
    names = [f"mixed-{number}" for number in range(MOST_ATTEMPTS + 3)]
    of_worker = dict.fromkeys(names[1:], small)
    async with workers(*["mixed"] * len(names), of_worker=of_worker, **CANARY) as on:
        for _ in names:
            # All but one end with OutOfBlocks.
            await on.ask(PROMPT)
        assert (await examined(on))["dropped"] == 1
    told = (each.getMessage() for each in caplog.records)
    left = [each.split()[4] for each in told if each.startswith("the canary left worker")]
    assert len(left) == len(set(left)) == MOST_ATTEMPTS


async def test_idle_workers_take_turns_with_repetitions() -> None:
    async with workers(*["mixed"] * 4, **CANARY) as on:
        for number in range(40):
            await on.ask([number + 1, *PROMPT])
        assert await examined(on) == {"identical": 40}
        own = 40 // 4 * (len(PROMPT) + 1)
        assert all(on.load(name).computed_prompt_tokens > own for name in on.engines)
