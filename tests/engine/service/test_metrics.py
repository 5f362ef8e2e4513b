"""Counters and histograms of an engine process."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from recording_backend import IDLE
from trtmesh.chassis.errors import QueueFull
from trtmesh.engine.backend import SequenceEnd, StepOutput
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.v1 import generation_pb2 as pb


def scrape(metrics: EngineMetrics) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = generate_latest(registry).decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


def test_first_tokens_and_later_tokens_have_their_own_histograms() -> None:
    metrics = EngineMetrics()
    metrics.submitted([1, 2], 10, now=100.0)
    metrics.stepped(StepOutput(1, [1], [0], [1], [5]), now=100.4)
    metrics.stepped(StepOutput(2, [1, 2], [1, 0], [1, 1], [5, 6]), now=100.8)
    metrics.stepped(StepOutput(3, [1, 2], [2, 1], [2, 1], [5, 6, 7]), now=100.81)
    values = scrape(metrics)
    assert values["trtmesh_engine_time_to_first_token_seconds_count"] == 2
    assert abs(values["trtmesh_engine_time_to_first_token_seconds_sum"] - 1.2) < 1e-6
    assert values["trtmesh_engine_inter_token_seconds_count"] == 3
    assert values['trtmesh_engine_inter_token_seconds_bucket{le="0.02"}'] == 2
    assert values["trtmesh_engine_generated_tokens_total"] == 6
    assert values["trtmesh_engine_prompt_tokens_total"] == 10


def test_ends_are_counted_by_reason() -> None:
    metrics = EngineMetrics()
    metrics.submitted([1, 2], 10, now=0.0)
    metrics.ended(SequenceEnd(1, pb.FINISH_REASON_LENGTH, 10, 4, 1, queue_seconds=0.2), 1.0)
    metrics.ended(SequenceEnd(2, pb.FINISH_REASON_ERROR, 10, 0, 0, error=QueueFull("full")), 1.0)
    values = scrape(metrics)
    assert values['trtmesh_engine_sequences_finished_total{reason="length"}'] == 1
    assert values['trtmesh_engine_sequences_finished_total{reason="error"}'] == 1
    assert values['trtmesh_engine_errors_total{reason="QUEUE_FULL"}'] == 1
    assert values["trtmesh_engine_cached_prompt_tokens_total"] == 4
    assert values["trtmesh_engine_queue_seconds_count"] == 2
    # An ended sequence no longer awaits a first token.
    metrics.stepped(StepOutput(1, [1], [0], [1], [5]), now=1.0)
    assert scrape(metrics)["trtmesh_engine_time_to_first_token_seconds_count"] == 0


def test_busy_time_runs_while_sequences_live() -> None:
    metrics = EngineMetrics()
    assert metrics.busy_seconds(9.0) == 0
    metrics.submitted([1, 2], 10, now=10.0)
    metrics.submitted([3], 10, now=11.0)
    assert metrics.busy_seconds(12.5) == 2.5
    for key, now in ((2, 13.0), (1, 14.0), (3, 15.0)):
        metrics.ended(SequenceEnd(key, pb.FINISH_REASON_LENGTH, 10, 4, 1), now)
    assert metrics.live_sequences == 0
    assert metrics.busy_seconds(100.0) == 5
    metrics.submitted([4], 10, now=200.0)
    assert metrics.busy_seconds(201.0) == 6
    metrics.ended(SequenceEnd(4, pb.FINISH_REASON_LENGTH, 10, 4, 1), 203.0)
    assert metrics.busy_seconds(300.0) == 8


def test_waiting_for_kv_is_not_busy_time() -> None:
    metrics = EngineMetrics()
    metrics.submitted([1], 10, now=10.0, awaits_kv=True)
    assert metrics.busy_seconds(15.0) == 0
    metrics.stepped(StepOutput(1, [1], [0], [1], [5]), now=20.0)
    assert metrics.busy_seconds(21.0) == 1
    metrics.submitted([2], 10, now=22.0, awaits_kv=True)
    metrics.ended(SequenceEnd(1, pb.FINISH_REASON_LENGTH, 10, 4, 1), 23.0)
    assert metrics.busy_seconds(30.0) == 3
    metrics.ended(SequenceEnd(2, pb.FINISH_REASON_CANCELLED, 10, 0, 0), 31.0)
    assert (metrics.live_sequences, metrics.busy_seconds(40.0)) == (0, 3)


def test_gauges_show_the_last_report() -> None:
    metrics = EngineMetrics()
    assert scrape(metrics)["trtmesh_engine_total_blocks"] == 0
    metrics.stats = replace(IDLE, step_count=9, captured_steps=4, used_blocks=3, free_blocks=97)
    metrics.told_busy_seconds = 1.5
    values = scrape(metrics)
    assert values["trtmesh_engine_steps_total"] == 9
    assert values["trtmesh_engine_captured_steps_total"] == 4
    assert values["trtmesh_engine_busy_seconds_total"] == 1.5
    assert values["trtmesh_engine_used_blocks"] == 3
    assert values["trtmesh_engine_free_blocks"] == 97
