"""Handlers start and tasks go on a few at a time with rests between, in turn between queues."""

from __future__ import annotations

import asyncio

import pytest
from chassis.busy import keep_busy
from trtmesh.chassis.fair import turns
from trtmesh.chassis.fair.turns import (
    FIRST_GUESS_SECONDS,
    MAX_IN_SLICE,
    MAX_REST_SECONDS,
    START_SLICE_SECONDS,
    StartQueue,
    StartScheduler,
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
    StartQueue(StartScheduler()).add(Recorded("a", log))
    assert log == ["a"]


async def test_a_burst_proceeds_over_several_passes() -> None:
    scheduler, log = StartScheduler(), list[str]()
    queue = StartQueue(scheduler)
    for number in range(200):
        queue.add(Recorded(str(number), log))
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
    scheduler, log = StartScheduler(), list[str]()
    queue, other = StartQueue(scheduler), StartQueue(scheduler)
    for number in range(100):
        queue.add(Recorded(str(number), log))
    scheduler.wait(queue, Failing())
    scheduler.wait(other, Failing())
    queue.add(Recorded("last", log))
    await _until(log, 101)
    assert log == [*(str(number) for number in range(100)), "last"]
    assert complaints == ["this call fails"] * 2


async def test_connections_take_turns() -> None:
    scheduler, log = StartScheduler(), list[str]()
    greedy, modest = StartQueue(scheduler), StartQueue(scheduler)
    for _ in range(300):
        greedy.add(Recorded("greedy", log))
    before = len(log)
    modest.add(Recorded("modest", log))
    await _until(log, before + 2)
    assert "modest" in log[before : before + 2]


async def test_addresses_take_turns_before_their_connections() -> None:
    scheduler, log = StartScheduler(), list[str]()
    for _ in range(300):
        StartQueue(scheduler, "crowd").add(Recorded("crowd", log))
    before = len(log)
    StartQueue(scheduler, "alone").add(Recorded("alone", log))
    await _until(log, before + 2)
    assert "alone" in log[before : before + 2]


class Handler:
    """A call whose task works for a while, unless others did so in this pass."""

    def __init__(self, queue: StartQueue, seconds: float, log: list[str]) -> None:
        self._queue, self._seconds, self._log = queue, seconds, log
        self.task: asyncio.Task[None]

    def proceed(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._queue.turn_if_late()
        self._log.append(str(self._queue.origin))
        keep_busy(self._seconds)


def _add_handlers(scheduler: StartScheduler, count: int, seconds: float, log: list[str]) -> None:
    """Adds calls of one address, each of a connection of its own."""
    for _ in range(count):
        handler = Handler(StartQueue(scheduler, "busy"), seconds, log)
        handler._queue.add(handler)


async def test_dear_tasks_wait_though_cheap_ones_came_before() -> None:
    """The mean of cheap tasks lets many proceed at once."""
    scheduler, log = StartScheduler(), list[str]()
    for seconds, most in ((0.0, MAX_IN_SLICE), (START_SLICE_SECONDS, 4)):
        log.clear()
        _add_handlers(scheduler, 200, seconds, log)
        assert max(await _until(log, 200)) <= most


async def test_a_cheap_task_goes_before_dear_ones_of_another_address() -> None:
    """Right after cheap tasks, too: their mean lets many proceed at once, and the cheap one comes too late for its turn
    after a dear one."""
    scheduler, log = StartScheduler(), list[str]()
    _add_handlers(scheduler, 200, 0.0, log)
    await _until(log, 200)
    _add_handlers(scheduler, 100, 2 * START_SLICE_SECONDS, log)
    modest = Handler(StartQueue(scheduler, "modest"), 0.0, log)
    modest._queue.add(modest)
    await _until(log, 301)
    assert log.index("modest") <= 202


async def test_removed_calls_never_proceed() -> None:
    scheduler, log = StartScheduler(), list[str]()
    queue = StartQueue(scheduler)
    calls = [Recorded(str(number), log) for number in range(100)]
    for call in calls:
        queue.add(call)
    begun = len(log)
    for call in calls[begun:]:
        queue.remove(call)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(log) == begun
    queue.add(calls[-1])
    await _until(log, begun + 1)


async def test_a_task_has_its_turn_at_once() -> None:
    log, queue = list[str](), StartQueue(StartScheduler())
    asyncio.get_running_loop().call_soon(log.append, "next pass")
    await queue.turn()
    assert log == []


async def test_tasks_go_on_in_turns() -> None:
    scheduler, log = StartScheduler(), list[str]()
    queues = [StartQueue(scheduler), StartQueue(scheduler)]

    async def go_on(number: int) -> None:
        await queues[number % 2].turn()
        log.append(str(number))

    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(go_on(number))
        assert max(await _until(log, 200)) <= MAX_IN_SLICE
    assert log == [str(number) for number in range(200)]


async def test_one_task_has_a_turn_before_a_rest() -> None:
    log, queue = list[str](), StartQueue(StartScheduler())
    asyncio.get_running_loop().call_soon(log.append, "next pass")
    await queue.turn_before_rest()
    assert log == []
    await queue.turn_before_rest()
    assert log == ["next pass"]


async def test_few_of_many_long_tasks_go_on_in_a_pass() -> None:
    """Though they take so long that a rest seems to be over."""
    scheduler, log = StartScheduler(), list[str]()

    async def go_on() -> None:
        await StartQueue(scheduler).turn_before_rest()
        log.append("long")
        keep_busy(MAX_REST_SECONDS)

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(go_on())
        in_passes = await _until(log, 30)
    # All at once would be 30; the second pass guesses how long they take.
    assert in_passes[0] == 1
    assert max(in_passes) <= START_SLICE_SECONDS / FIRST_GUESS_SECONDS
    assert in_passes[-1] == 1


async def test_a_cancelled_task_leaves_its_lane() -> None:
    scheduler, log = StartScheduler(), list[str]()
    queue = StartQueue(scheduler)
    for number in range(100):
        queue.add(Recorded(str(number), log))
    waiting = asyncio.create_task(queue.turn())
    await asyncio.sleep(0)
    before = len(queue.waiting)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert len(queue.waiting) < before
    await _until(log, 100)
    assert not queue.waiting


async def test_a_rest_is_planned_only_for_calls_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, log = list[object](), list[str]()
    monkeypatch.setattr(turns, "after_rest", planned.append)
    scheduler = StartScheduler()
    queue = StartQueue(scheduler)
    queue.add(Recorded("first", log))
    await queue.turn()
    assert not planned
    for number in range(MAX_IN_SLICE):
        queue.add(Recorded(str(number), log))
    assert len(planned) == 1
    assert len(log) + len(queue.waiting) == 1 + MAX_IN_SLICE


async def test_a_slice_without_waiting_calls_is_over_after_a_rest() -> None:
    scheduler, log = StartScheduler(), list[str]()
    queue = StartQueue(scheduler)
    while scheduler.enter():
        pass
    keep_busy(MAX_REST_SECONDS)
    await asyncio.sleep(0)
    queue.add(Recorded("later", log))
    assert log == ["later"]


async def test_slow_calls_of_one_pass_are_one_slice() -> None:
    scheduler = StartScheduler()
    entered = 0
    while scheduler.enter():
        entered += 1
        assert entered <= MAX_IN_SLICE
        keep_busy(MAX_REST_SECONDS / 4)
    await asyncio.sleep(0)
    assert scheduler.enter()
