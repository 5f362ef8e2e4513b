"""Rest: passes of the loop between two slices of work that may wait, unless the passes are long."""

from __future__ import annotations

import asyncio

import pytest
from chassis.busy import keep_busy
from leaks import alive, gone, without_collector
from trtmesh.chassis.fair import turns
from trtmesh.chassis.fair.turns import MAX_REST_SECONDS, REST_PASSES, after_rest


async def test_a_chain_of_callbacks_advances_during_a_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long this machine takes for a pass.
    monkeypatch.setattr(turns, "MAX_REST_SECONDS", 60.0)
    loop, passes = asyncio.get_running_loop(), 0
    rested = loop.create_future()

    def hop() -> None:
        nonlocal passes
        passes += 1
        if not rested.done():
            loop.call_soon(hop)

    loop.call_soon(hop)
    after_rest(lambda: rested.set_result(passes))
    assert await rested >= REST_PASSES


async def test_a_rest_leaves_nothing_for_the_garbage_collector() -> None:
    class Work:
        def go_on(self) -> None:
            pass

    with without_collector():
        after_rest(Work().go_on)
        assert alive(Work)
        await gone(Work)


async def test_a_long_pass_ends_a_rest() -> None:
    log: list[str] = []
    after_rest(lambda: log.append("rested"))
    await asyncio.sleep(0)
    keep_busy(MAX_REST_SECONDS)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log == ["rested"]
