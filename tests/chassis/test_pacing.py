"""Pacing: handlers start and tasks go on a few at a time with rests between, in turn between lanes."""

from __future__ import annotations

import asyncio
from time import perf_counter

import pytest
from trtmesh.chassis import pacing as pacing_module
from trtmesh.chassis.http2.rest import MOST_SECONDS
from trtmesh.chassis.pacing import (
    FIRST_GUESS_SECONDS,
    MAX_IN_SLICE,
    SLICE_SECONDS,
    Lane,
    Pacing,
)


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
    assert len(log) <= MAX_IN_SLICE
    assert max(await _until(log, 200)) <= MAX_IN_SLICE
    assert log == [str(number) for number in range(200)]


async def test_a_call_that_fails_costs_no_other_its_turn() -> None:
    class Failing:
        def proceed(self) -> None:
            raise ValueError("this call fails")

    complaints = list[str]()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: complaints.append(str(context["exception"]))
    )
    pacing, log = Pacing(), list[str]()
    lane, other = Lane(pacing), Lane(pacing)
    for number in range(100):
        lane.add(Recorded(str(number), log))
    pacing.wait(lane, Failing())
    pacing.wait(other, Failing())
    lane.add(Recorded("last", log))
    await _until(log, 101)
    assert log == [*(str(number) for number in range(100)), "last"]
    assert complaints == ["this call fails"] * 2


async def test_connections_take_turns() -> None:
    pacing, log = Pacing(), list[str]()
    greedy, modest = Lane(pacing), Lane(pacing)
    for _ in range(300):
        greedy.add(Recorded("greedy", log))
    before = len(log)
    modest.add(Recorded("modest", log))
    await _until(log, before + 2)
    assert "modest" in log[before : before + 2]


async def test_addresses_take_turns_before_their_connections() -> None:
    pacing, log = Pacing(), list[str]()
    for _ in range(300):
        Lane(pacing, "crowd").add(Recorded("crowd", log))
    before = len(log)
    Lane(pacing, "alone").add(Recorded("alone", log))
    await _until(log, before + 2)
    assert "alone" in log[before : before + 2]


class Handler:
    """A call whose task works for a while, unless others did so in this pass."""

    def __init__(self, lane: Lane, seconds: float, log: list[str]) -> None:
        self._lane, self._seconds, self._log = lane, seconds, log
        self.task: asyncio.Task[None]

    def proceed(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._lane.turn_if_late()
        self._log.append("ran")
        _work(self._seconds)


async def test_dear_tasks_wait_though_cheap_ones_came_before() -> None:
    """The mean of cheap tasks lets many proceed at once."""
    pacing, log = Pacing(), list[str]()
    for seconds, most in ((0.0, MAX_IN_SLICE), (SLICE_SECONDS, 4)):
        log.clear()
        handlers = [Handler(Lane(pacing), seconds, log) for _ in range(200)]
        for handler in handlers:
            handler._lane.add(handler)
        assert max(await _until(log, 200)) <= most


async def test_removed_calls_never_proceed() -> None:
    pacing, log = Pacing(), list[str]()
    lane = Lane(pacing)
    calls = [Recorded(str(number), log) for number in range(100)]
    for call in calls:
        lane.add(call)
    begun = len(log)
    for call in calls[begun:]:
        lane.remove(call)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(log) == begun
    lane.add(calls[-1])
    await _until(log, begun + 1)


async def test_a_task_has_its_turn_at_once() -> None:
    log, lane = list[str](), Lane(Pacing())
    asyncio.get_running_loop().call_soon(log.append, "next pass")
    await lane.turn()
    assert log == []


async def test_tasks_go_on_in_turns() -> None:
    pacing, log = Pacing(), list[str]()
    lanes = [Lane(pacing), Lane(pacing)]

    async def go_on(number: int) -> None:
        await lanes[number % 2].turn()
        log.append(str(number))

    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(go_on(number))
        assert max(await _until(log, 200)) <= MAX_IN_SLICE
    assert log == [str(number) for number in range(200)]


async def test_one_task_has_a_turn_before_a_rest() -> None:
    log, lane = list[str](), Lane(Pacing())
    asyncio.get_running_loop().call_soon(log.append, "next pass")
    await lane.turn_before_rest()
    assert log == []
    await lane.turn_before_rest()
    assert log == ["next pass"]


async def test_few_of_many_long_tasks_go_on_in_a_pass() -> None:
    """Though they take so long that a rest seems to be over."""
    pacing, log = Pacing(), list[str]()

    async def go_on() -> None:
        await Lane(pacing).turn_before_rest()
        log.append("long")
        _work(MOST_SECONDS)

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(go_on())
        in_passes = await _until(log, 30)
    # All at once would be 30; the second pass guesses how long they take.
    assert in_passes[0] == 1
    assert max(in_passes) <= SLICE_SECONDS / FIRST_GUESS_SECONDS
    assert in_passes[-1] == 1


async def test_a_cancelled_task_leaves_its_lane() -> None:
    pacing, log = Pacing(), list[str]()
    lane = Lane(pacing)
    for number in range(100):
        lane.add(Recorded(str(number), log))
    waiting = asyncio.create_task(lane.turn())
    await asyncio.sleep(0)
    before = len(lane.waiting)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert len(lane.waiting) < before
    await _until(log, 100)
    assert not lane.waiting


async def test_a_rest_is_planned_only_for_calls_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, log = list[object](), list[str]()
    monkeypatch.setattr(pacing_module, "after_rest", planned.append)
    pacing = Pacing()
    lane = Lane(pacing)
    lane.add(Recorded("first", log))
    await lane.turn()
    assert not planned
    for number in range(MAX_IN_SLICE):
        lane.add(Recorded(str(number), log))
    assert len(planned) == 1
    assert len(log) + len(lane.waiting) == 1 + MAX_IN_SLICE


def _work(seconds: float) -> None:
    ends = perf_counter() + seconds
    while perf_counter() <= ends:
        pass


async def test_a_slice_without_waiting_calls_is_over_after_a_rest() -> None:
    pacing, log = Pacing(), list[str]()
    lane = Lane(pacing)
    while pacing.enter():
        pass
    _work(MOST_SECONDS)
    await asyncio.sleep(0)
    lane.add(Recorded("later", log))
    assert log == ["later"]


async def test_slow_calls_of_one_pass_are_one_slice() -> None:
    pacing = Pacing()
    entered = 0
    while pacing.enter():
        entered += 1
        assert entered <= MAX_IN_SLICE
        _work(MOST_SECONDS / 4)
    await asyncio.sleep(0)
    assert pacing.enter()
