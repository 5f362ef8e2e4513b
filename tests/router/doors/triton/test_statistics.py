"""Counts of the Triton models: reasons of failures, histograms of lengths."""

from __future__ import annotations

import asyncio

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
from trtmesh.router.doors.triton.statistics import FAILURE_REASONS, failure_reason


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
