"""Metrics of an item from those of its sequences."""

from __future__ import annotations

from trtmesh.router.requests.item_events import combined
from trtmesh.v1 import generation_pb2 as pb


def test_first_times_last_time_and_sums() -> None:
    early = pb.PerfMetrics(
        arrival_time_ns=10,
        first_scheduled_time_ns=20,
        first_token_time_ns=40,
        last_token_time_ns=50,
        kv_cache_alloc_new_blocks=3,
        kv_cache_alloc_total_blocks=3,
        total_accepted_draft_tokens=1,
        total_draft_tokens=2,
        acceptance_rate=0.5,
    )
    late = pb.PerfMetrics(
        arrival_time_ns=11,
        first_scheduled_time_ns=30,
        first_token_time_ns=35,
        last_token_time_ns=60,
        kv_cache_alloc_new_blocks=1,
        kv_cache_reused_blocks=2,
        kv_cache_alloc_total_blocks=1,
        total_draft_tokens=2,
    )
    whole = pb.PerfMetrics(
        arrival_time_ns=10,
        first_scheduled_time_ns=20,
        first_token_time_ns=35,
        last_token_time_ns=60,
        kv_cache_alloc_new_blocks=4,
        kv_cache_reused_blocks=2,
        kv_cache_alloc_total_blocks=4,
        total_accepted_draft_tokens=1,
        total_draft_tokens=4,
        acceptance_rate=0.25,
    )
    assert combined([early, late]) == whole
    assert combined([early]) == early


def test_unknown_time_does_not_count() -> None:
    stopped = pb.PerfMetrics(arrival_time_ns=10)
    served = pb.PerfMetrics(arrival_time_ns=10, first_token_time_ns=40, last_token_time_ns=50)
    assert combined([stopped, served]) == served


def test_no_metrics_give_none() -> None:
    assert combined([]) is None
