"""Timestamps and block counts of a sequence."""

from __future__ import annotations

from trtmesh.engine.ledger import SequenceTimes
from trtmesh.v1 import generation_pb2 as pb


def test_queue_time_ends_with_scheduling() -> None:
    times = SequenceTimes(arrival_ns=1_000_000_000)
    assert times.queue_seconds > 1
    times.scheduled_ns = 3_500_000_000
    assert times.queue_seconds == 2.5


def test_queue_time_is_never_negative() -> None:
    assert SequenceTimes(arrival_ns=20, scheduled_ns=10).queue_seconds == 0


def test_metrics_at_start_leave_out_last_token() -> None:
    times = SequenceTimes(1, 2, 3, 4, new_blocks=5, reused_blocks=6)
    metrics = pb.PerfMetrics(
        arrival_time_ns=1,
        first_scheduled_time_ns=2,
        first_token_time_ns=3,
        last_token_time_ns=4,
        kv_cache_alloc_new_blocks=5,
        kv_cache_reused_blocks=6,
        kv_cache_alloc_total_blocks=5,
    )
    assert times.perf_metrics() == metrics
    metrics.last_token_time_ns = 0
    assert times.metrics_at_start() == metrics
