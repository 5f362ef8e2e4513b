"""Pacing: handlers start a few in a pass, in turn between connections."""

from __future__ import annotations

import asyncio

from trtmesh.chassis.grpc.server.pacing import MAX_IN_PASS, Lane, Pacing


class Recorded:
    """A call that notes when it proceeds."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def proceed(self) -> None:
        self._log.append(self.name)


async def _until(log: list[str], count: int) -> list[int]:
    """Calls that proceeded in each pass of the event loop, until `count` did."""
    counts = []
    while len(log) < count:
        before = len(log)
        await asyncio.sleep(0)
        counts.append(len(log) - before)
    return counts


async def test_a_call_proceeds_at_once() -> None:
    log = list[str]()
    Lane(Pacing()).add(Recorded("a", log))
    assert log == ["a"]


async def test_a_burst_proceeds_over_several_passes() -> None:
    pacing, log = Pacing(), list[str]()
    lane = Lane(pacing)
    for number in range(200):
        lane.add(Recorded(str(number), log))
    assert len(log) <= MAX_IN_PASS
    assert max(await _until(log, 200)) <= MAX_IN_PASS
    assert log == [str(number) for number in range(200)]


async def test_connections_take_turns() -> None:
    pacing, log = Pacing(), list[str]()
    greedy, modest = Lane(pacing), Lane(pacing)
    for _ in range(300):
        greedy.add(Recorded("greedy", log))
    before = len(log)
    modest.add(Recorded("modest", log))
    await _until(log, before + 2)
    assert "modest" in log[before : before + 2]


async def test_removed_calls_never_proceed() -> None:
    pacing, log = Pacing(), list[str]()
    lane = Lane(pacing)
    calls = [Recorded(str(number), log) for number in range(100)]
    for call in calls:
        lane.add(call)
    begun = len(log)
    for call in calls[begun:]:
        lane.remove(call)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(log) == begun
    lane.add(calls[-1])
    await _until(log, begun + 1)
