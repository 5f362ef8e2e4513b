"""The live sequences of a backend, their times, and its undelivered output and changes of blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import (
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    SequenceEnd,
    StepOutput,
)
from trtmesh.v1 import generation_pb2 as pb


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

    def perf_metrics(self) -> pb.PerfMetrics:
        return pb.PerfMetrics(
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

    def metrics_at_start(self) -> pb.PerfMetrics:
        """The metrics known with the first token."""
        metrics = self.perf_metrics()
        metrics.last_token_time_ns = 0
        return metrics


S = TypeVar("S")


class Ledger(Generic[S]):
    """Keeps the promises of Backend about keys: each added key ends exactly once, with nothing after its end.

    A backend adds tokens and details to `output` as they become known, during a step or between two steps.
    """

    def __init__(self) -> None:
        self.live: dict[int, S] = {}
        self.output = StepOutput(0)

    def add(self, key: int, sequence: S) -> None:
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


class KvEventLog:
    """Collects changes of the reusable blocks; a chain of stored blocks makes one event."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def stored(
        self,
        parent_hash: int,
        block_hash: int,
        token_ids: Sequence[int],
        adapter: Adapter | None = None,
    ) -> None:
        """A block became reusable."""
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlocksStored)
            and last.block_hashes[-1] == parent_hash
            and last.adapter == adapter
        ):
            last.block_hashes.append(block_hash)
            last.token_ids += token_ids
        else:
            self._events.append(BlocksStored(parent_hash, [block_hash], list(token_ids), adapter))

    def removed(self, block_hashes: Sequence[int]) -> None:
        """Blocks were evicted."""
        if not block_hashes:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.block_hashes += block_hashes
        else:
            self._events.append(BlocksRemoved(list(block_hashes)))

    def take(self) -> list[KvEvent]:
        """Returns the changes since the last call."""
        events, self._events = self._events, []
        return events
