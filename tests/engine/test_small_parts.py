"""The KV mirror, progress and metrics."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from recording_backend import IDLE
from trtmesh.chassis.errors import QueueFull
from trtmesh.engine.backend import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    SequenceEnd,
    StepOutput,
)
from trtmesh.engine.service.kv_mirror import KvMirror
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.engine.service.progress import Progress
from trtmesh.v1 import generation_pb2 as pb


class TestKvMirror:
    def test_events_are_numbered_from_zero(self) -> None:
        mirror = KvMirror()
        assert mirror.record([BlocksCleared(), BlocksCleared()]) == 0
        assert mirror.record([BlocksCleared()]) == 2
        assert mirror.next_sequence == 3

    def test_two_workers_have_two_epochs(self) -> None:
        assert KvMirror().epoch != KvMirror().epoch

    def test_a_snapshot_keeps_chains_together(self) -> None:
        mirror = KvMirror()
        mirror.record([BlocksStored(0, [1, 2], [10, 11, 12, 13])])
        mirror.record([BlocksStored(2, [3], [14, 15]), BlocksStored(1, [4], [16, 17], 9)])
        assert mirror.snapshot() == [
            BlocksStored(0, [1, 2, 3], [10, 11, 12, 13, 14, 15]),
            BlocksStored(1, [4], [16, 17], 9),
        ]

    @given(st.integers(), st.integers(0, 60))
    def test_a_snapshot_tells_parents_before_children(self, seed: int, steps: int) -> None:
        draw = random.Random(seed)
        mirror = KvMirror()
        parents: dict[int, int] = {}
        for _ in range(steps):
            block = draw.randint(1, 15)
            if block in parents:
                mirror.record([BlocksRemoved([block])])
                del parents[block]
            else:
                parents[block] = draw.choice([0, *(p for p in parents if p < block)])
                mirror.record([BlocksStored(parents[block], [block], [block, block])])
        told: dict[int, int] = {}
        for event in mirror.snapshot():
            parent = event.parent_hash
            for block in event.block_hashes:
                assert parent in told or parent not in parents
                told[block] = parent
                parent = block
        assert told == parents
        assert len(mirror) == len(parents)

    def test_clearing_forgets_everything(self) -> None:
        mirror = KvMirror()
        mirror.record([BlocksStored(0, [1], [5]), BlocksCleared()])
        assert mirror.snapshot() == []


class TestProgress:
    running = replace(IDLE, step_count=7, running_sequences=1)

    def test_an_idle_worker_is_well_for_ever(self) -> None:
        progress = Progress(1.0)
        assert progress.problem(IDLE, 0.0) is None
        assert progress.problem(IDLE, 1e9) is None

    def test_a_stall_is_noticed_and_over_with_the_next_step(self) -> None:
        progress = Progress(1.0)
        assert progress.problem(self.running, 100.0) is None
        assert progress.problem(self.running, 100.9) is None
        problem = progress.problem(self.running, 101.1)
        assert problem is not None
        assert "after number 7" in problem
        assert progress.problem(self.running, 200.0) == problem, "told once"
        assert progress.problem(replace(self.running, step_count=8), 200.1) is None

    def test_waiting_sequences_wait_for_steps_too(self) -> None:
        progress = Progress(1.0)
        waiting = replace(IDLE, waiting_sequences=1)
        progress.problem(waiting, 0.0)
        assert progress.problem(waiting, 2.0)

    def test_time_without_work_does_not_count(self) -> None:
        progress = Progress(1.0)
        progress.problem(replace(self.running, running_sequences=0), 0.0)
        assert progress.problem(self.running, 0.5) is None
        progress.problem(replace(self.running, running_sequences=0), 50.0)
        assert progress.problem(self.running, 50.9) is None


class TestMetrics:
    def scrape(self, metrics: EngineMetrics) -> dict[str, float]:
        registry = CollectorRegistry()
        registry.register(metrics)
        lines = generate_latest(registry).decode().splitlines()
        values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in values}

    def test_first_tokens_and_later_ones_are_told_apart(self) -> None:
        metrics = EngineMetrics()
        metrics.submitted([1, 2], 10, now=100.0)
        metrics.stepped(StepOutput(1, [1], [0], [1], [5]), now=100.4)
        metrics.stepped(StepOutput(2, [1, 2], [1, 0], [1, 1], [5, 6]), now=100.8)
        metrics.stepped(StepOutput(3, [1, 2], [2, 1], [2, 1], [5, 6, 7]), now=100.81)
        values = self.scrape(metrics)
        assert values["trtmesh_engine_time_to_first_token_seconds_count"] == 2
        assert abs(values["trtmesh_engine_time_to_first_token_seconds_sum"] - 1.2) < 1e-6
        assert values["trtmesh_engine_inter_token_seconds_count"] == 3
        assert values['trtmesh_engine_inter_token_seconds_bucket{le="0.02"}'] == 2
        assert values["trtmesh_engine_generated_tokens_total"] == 6
        assert values["trtmesh_engine_prompt_tokens_total"] == 10

    def test_ends_are_counted_by_reason(self) -> None:
        metrics = EngineMetrics()
        metrics.submitted([1, 2], 10, now=0.0)
        metrics.ended(SequenceEnd(1, pb.FINISH_REASON_LENGTH, 10, 4, 1, queue_seconds=0.2), 1.0)
        metrics.ended(
            SequenceEnd(2, pb.FINISH_REASON_ERROR, 10, 0, 0, error=QueueFull("full")), 1.0
        )
        values = self.scrape(metrics)
        assert values['trtmesh_engine_sequences_finished_total{reason="length"}'] == 1
        assert values['trtmesh_engine_sequences_finished_total{reason="error"}'] == 1
        assert values['trtmesh_engine_errors_total{reason="QUEUE_FULL"}'] == 1
        assert values["trtmesh_engine_cached_prompt_tokens_total"] == 4
        assert values["trtmesh_engine_queue_seconds_count"] == 2
        # An ended sequence no longer awaits its first token.
        metrics.stepped(StepOutput(1, [1], [0], [1], [5]), now=1.0)
        assert self.scrape(metrics)["trtmesh_engine_time_to_first_token_seconds_count"] == 0

    def test_a_worker_is_busy_from_the_first_sequence_it_has_to_the_last(self) -> None:
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

    def test_the_last_stats_are_shown(self) -> None:
        metrics = EngineMetrics()
        assert self.scrape(metrics)["trtmesh_engine_total_blocks"] == 0
        metrics.stats = replace(IDLE, step_count=9, used_blocks=3, free_blocks=97)
        metrics.told_busy_seconds = 1.5
        values = self.scrape(metrics)
        assert values["trtmesh_engine_steps_total"] == 9
        assert values["trtmesh_engine_busy_seconds_total"] == 1.5
        assert values["trtmesh_engine_used_blocks"] == 3
        assert values["trtmesh_engine_free_blocks"] == 97
