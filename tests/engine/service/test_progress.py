"""Liveness as progress."""

from __future__ import annotations

from dataclasses import replace

from recording_backend import IDLE
from trtmesh.engine.service.engine_service import Progress

RUNNING = replace(IDLE, step_count=7, running_sequences=1)


def test_idle_engine_is_well() -> None:
    progress = Progress(1.0)
    assert progress.problem(IDLE, 0.0) is None
    assert progress.problem(IDLE, 1e9) is None


def test_stall_ends_with_the_next_step() -> None:
    progress = Progress(1.0)
    assert progress.problem(RUNNING, 100.0) is None
    assert progress.problem(RUNNING, 100.9) is None
    problem = progress.problem(RUNNING, 101.1)
    assert problem is not None
    assert "after number 7" in problem
    assert progress.problem(RUNNING, 200.0) == problem, "told once"
    assert progress.problem(replace(RUNNING, step_count=8), 200.1) is None


def test_waiting_sequences_without_steps_are_a_stall() -> None:
    progress = Progress(1.0)
    waiting = replace(IDLE, waiting_sequences=1)
    progress.problem(waiting, 0.0)
    assert progress.problem(waiting, 2.0)


def test_time_without_work_is_not_a_stall() -> None:
    progress = Progress(1.0)
    progress.problem(replace(RUNNING, running_sequences=0), 0.0)
    assert progress.problem(RUNNING, 0.5) is None
    progress.problem(replace(RUNNING, running_sequences=0), 50.0)
    assert progress.problem(RUNNING, 50.9) is None
