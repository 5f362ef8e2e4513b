"""Turns: every work gets on, none keeps the others waiting for all of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from time import perf_counter

from chassis.busy import keep_busy
from leaks import gone, without_collector
from trtmesh.chassis.fair.turns import (
    PARSE_SLICE_SECONDS,
    TURN_SECONDS,
    ConnectionQueue,
    ParseScheduler,
)


class Heavy:
    """Work of many parts, each a tenth of a turn."""

    def __init__(self, parts: int, log: list[Heavy]) -> None:
        self.parts = parts
        self.log = log
        self.done = asyncio.Event()

    def go_on(self, until: float) -> bool:
        self.log.append(self)
        while self.parts and perf_counter() < until:
            self.parts -= 1
            keep_busy(TURN_SECONDS / 10)
        return self.parts > 0

    def completed(self) -> None:
        self.done.set()


async def test_light_work_is_done_at_once() -> None:
    turns, log = ParseScheduler(), list[Heavy]()
    assert not turns.take(Heavy(1, log))
    assert len(log) == 1


async def test_time_spent_outside_of_turns_is_taken_from_the_next() -> None:
    turns, log = ParseScheduler(), list[Heavy]()
    light = Heavy(1, log)
    turns.charge(10 * PARSE_SLICE_SECONDS)
    assert turns.take(light)
    assert not log
    await light.done.wait()
    # A machine that stands still meanwhile takes more from the slices.
    while turns.take(later := Heavy(1, log)):
        await later.done.wait()


async def test_works_take_turns() -> None:
    turns, log = ParseScheduler(), list[Heavy]()
    works = [Heavy(100, log) for _ in range(3)]
    assert [turns.take(work) for work in works] == [True] * 3
    for work in works:
        await work.done.wait()
    for work in works:
        first, last = log.index(work), len(log) - log[::-1].index(work)
        between = set(log[first:last])
        assert between == set(works)


async def test_new_work_comes_before_the_rest_of_oldkeep_busy() -> None:
    turns, log = ParseScheduler(), list[Heavy]()
    old = [Heavy(1000, log) for _ in range(10)]
    for work in old:
        turns.take(work)
    while set(log) != set(old):  # noqa: ASYNC110 - each pass of the loop counts
        await asyncio.sleep(0)
    before, new = len(log), Heavy(1, log)
    if turns.take(new):
        await new.done.wait()
    assert log.index(new) - before <= PARSE_SLICE_SECONDS / TURN_SECONDS + 1
    assert all(work.parts for work in old)


async def test_old_work_gets_on_beside_endless_newkeep_busy() -> None:
    turns, log = ParseScheduler(), list[Heavy]()

    class Endless(Heavy):
        def come_back(self) -> None:
            self.parts = 9
            if not turns.take(self):
                asyncio.get_running_loop().call_soon(self.come_back)

        def completed(self) -> None:
            asyncio.get_running_loop().call_soon(self.come_back)

    old = Heavy(10_000, log)
    turns.take(old)
    for _ in range(8):
        Endless(0, log).come_back()
    while len(log) < 200:  # noqa: ASYNC110 - each pass of the loop counts
        await asyncio.sleep(0)
    # Half of the turns are for old work, and what was interrupted is old work too.
    assert log.count(old) > len(log) / 4 / 9


async def test_many_works_of_a_line_take_the_turns_of_one() -> None:
    turns, log = ParseScheduler(), list[Heavy]()
    many, few = ConnectionQueue(turns), ConnectionQueue(turns)
    works = [Heavy(30, log) for _ in range(50)]
    for work in works:
        many.take(work)
    single = Heavy(30, log)
    few.take(single)
    await single.done.wait()
    assert sum(work.done.is_set() for work in works) <= 3
    for work in works:
        await work.done.wait()


async def test_other_callbacks_run_between_passes() -> None:
    turns, log = ParseScheduler(), list[Heavy]()
    for _ in range(5):
        turns.take(Heavy(100, log))
    turns_between = []
    while len(log) < 20:
        before = len(log)
        await asyncio.sleep(0)
        turns_between.append(len(log) - before)
    assert max(turns_between) <= PARSE_SLICE_SECONDS / TURN_SECONDS + 1


async def test_other_callbacks_run_although_works_bring_others() -> None:
    """A connection that ends in its turn brings the ends of its calls."""
    turns, log = ParseScheduler(), list[Heavy]()

    class Ending(Heavy):
        def go_on(self, until: float) -> bool:
            waits = super().go_on(until)
            if not waits:
                turns.take(Heavy(200, log))
            return waits

    for _ in range(20):
        turns.take(Ending(20, log))
    turns_between = []
    while len(log) < 200:
        before = len(log)
        await asyncio.sleep(0)
        turns_between.append(len(log) - before)
    assert max(turns_between) <= PARSE_SLICE_SECONDS / TURN_SECONDS + 2


async def test_a_failing_work_does_not_stop_others() -> None:
    class Broken(Heavy):
        def go_on(self, until: float) -> bool:
            if super().go_on(until):
                return True
            raise ZeroDivisionError

    turns, log = ParseScheduler(), list[Heavy]()
    caught: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context))
    broken, other = Broken(20, log), Heavy(100, log)
    turns.take(broken)
    turns.take(other)
    await other.done.wait()
    assert len(caught) == 1


async def test_addresses_take_turns_before_their_connections() -> None:
    turns, log = ParseScheduler(), list[Heavy]()
    crowd = [Heavy(100, log) for _ in range(300)]
    for work in crowd:
        turns.take(work, "crowd")
    alone, before = Heavy(1, log), len(log)
    assert turns.take(alone, "alone")
    await alone.done.wait()
    # One turn of the crowd's new work, and one of its old.
    assert log.index(alone) - before <= 2


async def test_the_error_of_cancelled_work_is_freed() -> None:
    """A step may end the call whose message it parses. Services rarely collect garbage."""

    class CallEndedError(Exception): ...

    def steps() -> Generator[None, None, None]:
        keep_busy(TURN_SECONDS)
        yield
        reading.cancel()
        raise CallEndedError

    with without_collector():
        reading = asyncio.create_task(ConnectionQueue(ParseScheduler()).run(steps()))
        await asyncio.wait([reading])
        assert reading.cancelled()
        await gone(CallEndedError)
