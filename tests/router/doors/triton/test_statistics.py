"""Counts of the Triton models: reasons of failures, histograms of lengths."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from trtmesh.chassis.errors import (
    BackendFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoWorker,
    QueueFull,
    RateLimited,
    SlowClient,
    WorkerLost,
)
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.statistics import (
    FAILURE_REASONS,
    Counts,
    Statistics,
    failure_reason,
)
from trtmesh.router.doors.triton.templates.template import Call, Spent


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (asyncio.CancelledError(), "CANCELED"),
        (SlowClient("x"), "CANCELED"),
        (QueueFull("x"), "REJECTED"),
        (NoWorker("x"), "REJECTED"),
        (RateLimited("x"), "REJECTED"),
        (BackendFailed("x"), "BACKEND"),
        (WorkerLost("x"), "BACKEND"),
        (InvalidRequest("x"), "OTHER"),
        (InternalError("x"), "OTHER"),
        (DeadlineExceeded("x"), "OTHER"),
    ],
)
def test_failure_reason_of_an_error(error: BaseException, reason: str) -> None:
    assert failure_reason(error) == reason
    assert reason in FAILURE_REASONS


MODELS = triton_models(TritonSettings())
SPENT = (Spent(1, 20, 300, 4_000, 50_000, 600_000), Spent(7, 60, 500, 4_000, 30_000, 200_000))


def served(statistics: Statistics, name: str, *spent: Spent) -> None:
    """Counts requests of two rows to a model by the phases of each."""
    for each in spent:
        call = Call(MODELS[name], "", {}, 2, False, frozenset(), {})
        counting: Any = statistics.counting(call)
        counting.spent = partial(Spent._make, each)
        with counting:
            pass


def test_steps_of_an_ensemble_count_its_requests_beside_their_own() -> None:
    statistics, whole = Statistics(MODELS), sum(map(sum, SPENT))
    served(statistics, "ensemble", *SPENT)
    served(statistics, "postprocessing", Spent(generating=9))
    counts = statistics.counts()
    assert counts.keys() == {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing"}
    assert [(each.succeeded, each.rows) for each in counts.values()] == [(2, 4)] * 3 + [(3, 6)]
    assert {name: each.success_ns for name, each in counts.items()} == {
        "ensemble": whole,
        "preprocessing": 1 + 20 + 7 + 60,
        "tensorrt_llm": 300 + 4_000 + 500 + 4_000,
        "postprocessing": 50_000 + 600_000 + 30_000 + 200_000 + 9,
    }
    core = counts["tensorrt_llm"]
    assert (core.queue_ns, core.input_ns, core.infer_ns, core.output_ns) == (800, 0, 8_000, 0)


def test_all_models_are_described_by_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics, sums = Statistics(MODELS), 0
    served(statistics, "ensemble", *SPENT)
    counts = statistics.counts

    def counted() -> dict[str, Counts]:
        nonlocal sums
        sums += 1
        return counts()

    monkeypatch.setattr(statistics, "counts", counted)
    described = {each.name: each for each in statistics.describe(MODELS.values())}
    assert sums == 1
    assert described.keys() == MODELS.keys()
    assert described["preprocessing"].inference_count == 4
    assert described["tensorrt_llm_bls"].inference_count == 0
