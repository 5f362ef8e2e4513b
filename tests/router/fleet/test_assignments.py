"""The sequences of a worker: which are late, and how seldom they are looked at."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest
from trtmesh.router.fleet.assignments import Assignments
from trtmesh.router.metrics import Latencies
from trtmesh.router.placement.load_guard import LoadGuard
from trtmesh.router.streams.sequence import SequenceRun, SequenceTimes

QUEUE_SECONDS, TICK_SECONDS = 30.0, 0.1


class Run:
    """As much of a sequence as a worker's assignments need."""

    def __init__(self) -> None:
        self.times = SequenceTimes(0.0, Latencies())

    def assign(self, _: Any) -> None:
        self.times.on_assigned()

    @property
    def is_late(self) -> bool:
        times, now = self.times, asyncio.get_running_loop().time()
        has_token = times.last_token > times.assigned
        since = times.last_token if has_token else times.started or times.assigned
        return now - since > times.patience * QUEUE_SECONDS


class Clock:
    """The time of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


def assign(assignments: Assignments, run: Run, now: float) -> int:
    booking = assignments._guard.book(1, 1, now)
    return assignments.assign(cast("list[SequenceRun]", [run]), booking)


def new_assignments() -> Assignments:
    return Assignments("w:1", LoadGuard(lambda: None), lambda _: None, QUEUE_SECONDS)


async def test_every_late_sequence_is_found_with_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, assignments, chance = Clock(monkeypatch), new_assignments(), random.Random(7)
    runs: dict[int, Run] = {}
    found = 0
    for _ in range(3000):
        clock.now += TICK_SECONDS
        if chance.random() < 0.1:
            run = Run()
            runs[assign(assignments, run, clock.now)] = run
        for handle in [h for h in runs if chance.random() < 0.002]:
            assignments.ended(handle, None, clock.now)
            del runs[handle]
        for run in runs.values():
            if chance.random() < 0.003:
                run.times.last_token = clock.now
            elif chance.random() < 0.003:
                run.times.started = clock.now
        late = cast("list[Run]", assignments.late(clock.now))
        assert late == [run for run in runs.values() if run.is_late]
        for run in late:
            found += 1
            run.times.patience *= 2
    assert found > 20


async def test_waiting_sequences_are_not_looked_at_before_one_can_be_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, assignments, looks = Clock(monkeypatch), new_assignments(), 0
    due = Assignments._due

    def counted(self: Assignments, times: SequenceTimes) -> float:
        nonlocal looks
        looks += 1
        return due(self, times)

    for _ in range(10_000):
        assign(assignments, Run(), clock.now)
    monkeypatch.setattr(Assignments, "_due", counted)
    while clock.now < 1000.0 + QUEUE_SECONDS - TICK_SECONDS:
        clock.now += TICK_SECONDS
        assert not assignments.late(clock.now)
    assert not looks
    clock.now += 2 * TICK_SECONDS
    assert len(assignments.late(clock.now)) == 10_000
