"""The live sequences of a backend, their times, and its undelivered output."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from trtmesh.engine.backend import PerfMetrics, SequenceEnd, StepOutput


@dataclass(slots=True)
class SequenceTimes:
    """Times in nanoseconds of the Unix clock, blocks allocated over all starts of the sequence, and drafts."""

    arrival_ns: int = field(default_factory=time.time_ns)
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    new_blocks: int = 0
    reused_blocks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

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
            acceptance_rate=self.accepted_draft_tokens / (self.draft_tokens or 1),
            total_accepted_draft_tokens=self.accepted_draft_tokens,
            total_draft_tokens=self.draft_tokens,
        )

    def metrics_at_start(self) -> PerfMetrics:
        """The metrics known with the first token."""
        return replace(self.perf_metrics(), last_token_time_ns=0)


S = TypeVar("S")


class Ledger(Generic[S]):
    """Keeps the promises of Backend about keys: each added key ends exactly once, with nothing after its end.

    A backend adds tokens and details to `output` as they become known, during a step or between two steps.
    """

    def __init__(self) -> None:
        self.live: dict[int, S] = {}
        self.output = StepOutput(0)

    def add(self, key: int, sequence: S) -> None:
        """Adds a key of an admitted item."""
        self.live[key] = sequence

    def end(self, end: SequenceEnd) -> None:
        """Ends a live key; the sequence's blocks must be free already."""
        del self.live[end.key]
        self.output.ends.append(end)

    def take(self, step_count: int) -> StepOutput:
        """Returns the output since the last call."""
        output, self.output = self.output, StepOutput(0)
        output.step_count = step_count
        return output
