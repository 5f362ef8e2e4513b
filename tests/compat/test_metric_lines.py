"""How metrics are written that no idle mesh of simulated engines shows."""

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
from trtmesh.router.triton.engine_metrics import EngineFigures, engine_families
from trtmesh.router.triton.exposition import Sample, family, number
from trtmesh.router.triton.statistics import FAILURE_REASONS, failure_reason
from trtmesh.router.triton.token_lengths import Lengths

BUSY = EngineFigures(
    max_batch_size=16,
    running=5,
    waiting=2,
    in_context=1,
    paused=1,
    pending_prompt_tokens=77,
    total_blocks=8,
    used_blocks=2,
    free_blocks=6,
)


def written(figures: EngineFigures) -> list[str]:
    text = "".join(engine_families({"m": figures}))
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_batching_in_flight() -> None:
    lines = written(BUSY)
    name = "nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="
    assert [line for line in lines if "batcher" in line] == [
        f'{name}"total_context_tokens",model="m",version="1"}} 77',
        f'{name}"generation_requests",model="m",version="1"}} 4',
        f'{name}"micro_batch_id",model="m",version="1"}} 0',
        f'{name}"paused_requests",model="m",version="1"}} 1',
    ]
    requests = [line for line in lines if line.startswith("nv_trt_llm_request_metrics")]
    assert requests == [
        f'nv_trt_llm_request_metrics{{model="m",request_type="{word}",version="1"}} {value}'
        for word, value in (
            ("active", 7),
            ("max", 16),
            ("scheduled", 5),
            ("context", 1),
            ("waiting", 2),
        )
    ]
    assert not [line for line in lines if "v1" in line]


def test_static_batching_has_a_family_of_its_own() -> None:
    lines = written(EngineFigures(static_batching=True, max_batch_size=16, running=5, in_context=1))
    name = "nv_trt_llm_v1_metrics{model="
    assert [line for line in lines if "v1" in line] == [
        f'{name}"m",v1_specific_metric="total_context_tokens",version="1"}} 0',
        f'{name}"m",v1_specific_metric="total_generation_tokens",version="1"}} 4',
        f'{name}"m",v1_specific_metric="empty_generation_slots",version="1"}} 11',
    ]
    assert not [line for line in lines if "batcher" in line]


def test_a_fraction_is_no_whole_number() -> None:
    (line,) = [line for line in written(BUSY) if "fraction" in line]
    assert line == (
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.25'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (104.0, "104"),
        (2**60, "1152921504606846976"),
        (1 / 3, "0.3333333333333333"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_labels_cannot_break_a_line() -> None:
    text = family("f", "F.", "gauge", [Sample({"model": 'a"b\\c\nd'}, 1)])
    assert text.splitlines()[-1] == r'f{model="a\"b\\c\nd"} 1'
    assert family("f", "F.", "gauge", []) == ""


def test_a_bound_belongs_to_its_bucket() -> None:
    lengths = Lengths()
    for value in (0, 10, 11, 1000, 1001):
        lengths.observe(value)
    assert dict(lengths.buckets()) == {"10": 2, "50": 3, "100": 3, "500": 3, "1000": 4, "+Inf": 5}
    assert lengths.total == 2022


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
def test_why_a_request_failed(error: BaseException, reason: str) -> None:
    assert failure_reason(error) == reason
    assert reason in FAILURE_REASONS
