"""A worker is alive as long as it speaks, reads and makes steps; one that has nothing to do is too."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.router.fleet.pulse import TICK_SECONDS, Pulse
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.v1 import engine_pb2 as pb

DEADLINES = Deadlines(stall_seconds=1.0, accepted_seconds=0.5, next_token_seconds=2.0)


def ticks_until_a_problem(pulse: Pulse, load: pb.Load | None, most: int = 200) -> tuple[int, str]:
    """How many ticks pass without a problem, while `load` is told before each tick, and the problem."""
    for tick in range(most):
        if load is not None:
            pulse.heard()
            pulse.on_load(load)
        if problem := pulse.tick():
            return tick, problem
    return most, ""


def test_silence_is_a_problem_and_any_message_ends_it() -> None:
    pulse = Pulse(DEADLINES)
    assert ticks_until_a_problem(pulse, None) == (10, "it was silent for 1 s")
    pulse.heard()
    assert pulse.tick() == ""


def test_a_worker_that_reports_rarely_may_be_silent_for_longer() -> None:
    ticks, _ = ticks_until_a_problem(Pulse(DEADLINES, load_interval_seconds=1.0), None)
    assert ticks == 5 / TICK_SECONDS


def test_reports_without_steps_are_a_problem() -> None:
    ticks, problem = ticks_until_a_problem(
        Pulse(DEADLINES), pb.Load(step_count=7, running_sequences=1)
    )
    assert (ticks, problem) == (
        20,
        "it made no step for 2 s after number 7, though sequences wait for one",
    )


def test_one_that_has_nothing_to_do_is_well() -> None:
    assert ticks_until_a_problem(Pulse(DEADLINES), pb.Load(step_count=7)) == (200, "")


def test_a_slow_worker_is_given_the_time_that_its_steps_take() -> None:
    """Steps of 1.5 s are known, so it takes four times as long to be suspected."""
    pulse = Pulse(DEADLINES)
    for tick in range(60):
        pulse.heard()
        pulse.on_load(pb.Load(step_count=tick // 15, running_sequences=1))
        assert pulse.tick() == ""
    ticks, problem = ticks_until_a_problem(pulse, pb.Load(step_count=3, running_sequences=1))
    assert 40 < ticks <= 60
    assert "no step" in problem


def test_a_worker_that_was_silent_for_long_is_no_slow_one() -> None:
    pulse = Pulse(DEADLINES)
    busy = pb.Load(step_count=1, running_sequences=1)
    assert ticks_until_a_problem(pulse, busy, most=3) == (3, "")
    for _ in range(80):
        pulse.tick()
    ticks, problem = ticks_until_a_problem(pulse, pb.Load(step_count=2, running_sequences=1))
    assert ticks == 20
    assert "no step" in problem


def test_what_is_not_read_is_a_problem() -> None:
    """As where only the way to the worker is cut: its reports still come."""
    pulse = Pulse(DEADLINES)
    pulse.submitted()
    ticks, problem = ticks_until_a_problem(pulse, pb.Load(received_items=0))
    assert (ticks, problem) == (5, "it did not read an item for 0.5 s")
    pulse.on_load(pb.Load(received_items=1))
    assert ticks_until_a_problem(pulse, pb.Load(received_items=1)) == (200, "")


def test_a_worker_that_does_not_count_what_it_read_is_believed() -> None:
    pulse = Pulse(DEADLINES)
    pulse.submitted()
    assert ticks_until_a_problem(pulse, pb.Load()) == (200, "")


@given(st.lists(st.integers(0, 9), max_size=60))
def test_one_that_goes_on_within_its_deadlines_is_never_suspected(gaps: list[int]) -> None:
    """Reports at most 0.9 s apart, each with a new step: well, however they are spaced."""
    pulse = Pulse(DEADLINES)
    steps: Iterator[int] = iter(range(len(gaps)))
    for gap in gaps:
        for _ in range(gap):
            assert pulse.tick() == ""
        pulse.heard()
        pulse.on_load(pb.Load(step_count=next(steps), running_sequences=1))
