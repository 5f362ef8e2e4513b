"""A slow router gets fewer, larger messages over a real socket and loses nothing."""

from __future__ import annotations

import random

from engine.short_names import by_short_names
from engine_streams import Received, RouterStream, router_stream, serving, submit
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings


async def outputs(credit: int, acknowledge_after: range | None) -> dict[int, Received]:
    """Eight sequences, read with randomly delayed acknowledgements; None acknowledges at once."""
    schedule = random.Random(5)
    backend = SimulatedBackend(by_short_names(SimulatedSettings, step_ms=0))
    async with (
        serving(backend) as engine,
        router_stream(engine.address, credit=credit) as stream,
    ):
        stream.acknowledging = acknowledge_after is None
        await stream.send(*(submit(handle, 300, prompt=[50, handle]) for handle in range(8)))
        due = 0
        while not all(h in stream.received and stream.received[h].end for h in range(8)):
            await stream.receive()
            assert len(stream.steps) <= due + credit or acknowledge_after is None
            if acknowledge_after is not None and len(stream.steps) == due + credit:
                await _let_loads_pass(stream, schedule.choice(acknowledge_after))
                due = schedule.randint(due + 1, len(stream.steps))
                await stream.acknowledge(due)
        if acknowledge_after is not None:
            assert len(stream.steps) < 300, "nothing was merged"
            assert engine.service.metrics.merged_steps > 0
        return stream.received


async def _let_loads_pass(stream: RouterStream, count: int) -> None:
    seen = len(stream.loads) + count
    await stream.until(lambda: len(stream.loads) >= seen)


async def test_withheld_acknowledgements_lose_and_repeat_nothing() -> None:
    prompt_reader = await outputs(credit=4, acknowledge_after=None)
    slow_reader = await outputs(credit=2, acknowledge_after=range(1, 4))
    for handle in range(8):
        assert len(slow_reader[handle].token_ids) == 300
        assert slow_reader[handle].token_ids == prompt_reader[handle].token_ids


async def test_a_slow_router_does_not_delay_another() -> None:
    backend = SimulatedBackend(by_short_names(SimulatedSettings, step_ms=1))
    async with (
        serving(backend) as engine,
        router_stream(engine.address, credit=1, acknowledging=False) as stalled,
        router_stream(engine.address) as stream,
    ):
        await stalled.send(submit(1, 2000))
        await stalled.until(lambda: stalled.steps)
        await stream.send(submit(1, 100))
        assert len((await stream.end(1)).token_ids) == 100
        assert len(stalled.steps) == 1
