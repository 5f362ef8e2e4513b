"""A worker is alive while sending, reading and making steps, or while idle."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.router.fleet.liveness import TICK_SECONDS, LivenessMonitor
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.v1 import engine_pb2 as pb

DEADLINES = Deadlines(silence_seconds=1.0, step_gap_seconds=2.0)


def ticks_until_a_problem(
    liveness: LivenessMonitor, load: pb.Load | None, most: int = 200
) -> tuple[int, str]:
    """Ticks without a problem, with `load` reported before each, and the problem."""
    for tick in range(most):
        if load is not None:
            liveness.heard()
            liveness.on_load(load)
        if problem := liveness.tick():
            return tick, problem
    return most, ""


def test_silence_is_a_problem_and_any_message_ends_it() -> None:
    liveness = LivenessMonitor(DEADLINES)
    assert ticks_until_a_problem(liveness, None) == (10, "it was silent for 1 s")
    liveness.heard()
    assert liveness.tick() == ""


def test_long_load_interval_extends_the_permitted_silence() -> None:
    ticks, _ = ticks_until_a_problem(LivenessMonitor(DEADLINES, load_interval_seconds=1.0), None)
    assert ticks == 5 / TICK_SECONDS


def test_reports_without_steps_are_a_problem() -> None:
    ticks, problem = ticks_until_a_problem(
        LivenessMonitor(DEADLINES), pb.Load(step_count=7, running_sequences=1)
    )
    assert (ticks, problem) == (
        20,
        "it made no step for 2 s after number 7, though sequences wait for one",
    )


def test_idle_worker_is_well() -> None:
    assert ticks_until_a_problem(LivenessMonitor(DEADLINES), pb.Load(step_count=7)) == (200, "")


def test_long_steps_extend_the_deadline() -> None:
    """After steps of 1.5 s, the limit is four times as long."""
    liveness = LivenessMonitor(DEADLINES)
    for tick in range(60):
        liveness.heard()
        liveness.on_load(pb.Load(step_count=tick // 15, running_sequences=1))
        assert liveness.tick() == ""
    ticks, problem = ticks_until_a_problem(liveness, pb.Load(step_count=3, running_sequences=1))
    assert 40 < ticks <= 60
    assert "no step" in problem


def test_silence_does_not_count_as_a_long_step() -> None:
    liveness = LivenessMonitor(DEADLINES)
    busy = pb.Load(step_count=1, running_sequences=1)
    assert ticks_until_a_problem(liveness, busy, most=3) == (3, "")
    for _ in range(80):
        liveness.tick()
    ticks, problem = ticks_until_a_problem(liveness, pb.Load(step_count=2, running_sequences=1))
    assert ticks == 20
    assert "no step" in problem


def test_unread_item_is_a_problem() -> None:
    """As if only the direction to the worker were cut: reports still arrive."""
    liveness = LivenessMonitor(DEADLINES)
    liveness.submitted()
    ticks, problem = ticks_until_a_problem(liveness, pb.Load(received_items=0))
    assert (ticks, problem) == (10, "it did not read an item for 1 s")
    liveness.on_load(pb.Load(received_items=1))
    assert ticks_until_a_problem(liveness, pb.Load(received_items=1)) == (200, "")


def test_worker_without_read_counts_is_trusted() -> None:
    liveness = LivenessMonitor(DEADLINES)
    liveness.submitted()
    assert ticks_until_a_problem(liveness, pb.Load()) == (200, "")


@given(st.lists(st.integers(0, 9), max_size=60))
def test_progress_within_the_deadlines_is_never_a_problem(gaps: list[int]) -> None:
    """Reports at most 0.9 s apart, each with a new step."""
    liveness = LivenessMonitor(DEADLINES)
    steps: Iterator[int] = iter(range(len(gaps)))
    for gap in gaps:
        for _ in range(gap):
            assert liveness.tick() == ""
        liveness.heard()
        liveness.on_load(pb.Load(step_count=next(steps), running_sequences=1))
