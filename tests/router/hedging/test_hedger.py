"""When hedging looks: at moments that a test names."""

from __future__ import annotations

import asyncio
from typing import Any

from router.scripted import ScriptedEngine, eventually
from router.scripted_fleet import FIELDS, fleet
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.hedging.hedger import Hedger
from trtmesh.router.hedging.lateness import LEAST_SEEN
from trtmesh.router.placement import WorkerSnapshot

PREFILL_SECONDS = 0.025
PROMPT = [*range(1, 41)]
SOON = 0.001


class Prefilling:
    """A fleet that takes its time for prompts."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def snapshot(self) -> list[WorkerSnapshot]:
        found = self._fleet.snapshot()
        return [each._replace(prefill_seconds=PREFILL_SECONDS) for each in found]


async def test_first_token_is_late_once_its_prompt_had_the_time_to_be_computed() -> None:
    engines = [
        # No load is missing, however slow this machine is.
        ScriptedEngine(worker=name, supported_fields=FIELDS, load_interval_ms=100_000)
        for name in ("one", "two")
    ]
    async with fleet(*engines) as on:
        router, clock = on.client.router, asyncio.get_running_loop().time
        slow: Any = Prefilling(router._fleet)
        hedger = Hedger(0.02, slow, router._metrics)
        hedger.look(clock())
        for engine in engines:
            on.serve(engine)
        for _ in range(LEAST_SEEN):
            await on.ask([5, 6], max_tokens=1)
        await on.end()
        copies = router._metrics.hedges
        before = sum(len(engine.submits) for engine in engines)
        on.start(PROMPT, max_tokens=1)
        await on.submitted(before + 1)
        (worker,) = [each for each in router._fleet.workers.values() if each.sequences]
        (run,) = worker.sequences.values()
        hedger._learn()
        margin = hedger._first_margins[worker.description.model]
        assert margin
        computed = len(PROMPT) * PREFILL_SECONDS + hedger._snapshots[worker.address].step_seconds
        for seconds in (margin, computed, margin + computed - SOON):
            hedger.look(run.times.assigned + seconds + SOON / 2)
            assert not copies.total()
        hedger.look(run.times.assigned + margin + computed + SOON)
        assert copies["first_token", "started"] == copies.total() == 1
        await eventually(lambda: sum(len(engine.submits) for engine in engines) == before + 2)
