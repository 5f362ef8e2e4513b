"""Timestamps and block counts of a sequence."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from trtmesh.engine.backend import PerfMetrics


@dataclass(slots=True)
class SequenceTimes:
    """Times in nanoseconds of the Unix clock, and blocks allocated over all starts of the sequence."""

    arrival_ns: int = field(default_factory=time.time_ns)
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    new_blocks: int = 0
    reused_blocks: int = 0

    @property
    def queue_seconds(self) -> float:
        """Time from arrival to scheduling, or to now."""
        return max(0, (self.scheduled_ns or time.time_ns()) - self.arrival_ns) / 1e9

    def perf_metrics(self) -> PerfMetrics:
        return PerfMetrics(
            arrival_time_ns=self.arrival_ns,
            first_scheduled_time_ns=self.scheduled_ns,
            first_token_time_ns=self.first_token_ns,
            last_token_time_ns=self.last_token_ns,
            kv_cache_alloc_new_blocks=self.new_blocks,
            kv_cache_reused_blocks=self.reused_blocks,
            kv_cache_alloc_total_blocks=self.new_blocks,
        )

    def metrics_at_start(self) -> PerfMetrics:
        """The metrics known with the first token."""
        return replace(self.perf_metrics(), last_token_time_ns=0)
