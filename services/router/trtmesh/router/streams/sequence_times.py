"""When things happened to one sequence, by the event loop's time, and whether the next one is late."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from trtmesh.router.fleet.pulse import Deadlines
from trtmesh.v1 import generation_pb2 as pb


@dataclass(slots=True)
class SequenceTimes:
    """Times in seconds of the event loop's clock; 0 for what did not happen."""

    arrival: float
    """When its request came."""
    assigned: float = 0.0
    """When the worker that has it took it."""
    started: float = 0.0
    """When that worker's queue was first empty; 0 while the sequence may wait there."""
    first_token: float = 0.0
    last_token: float = 0.0
    patience: float = 1.0
    """How many times longer than the deadlines say it may wait."""

    def on_assigned(self) -> None:
        """A worker takes the sequence now."""
        self.assigned = asyncio.get_running_loop().time()
        self.started = 0.0

    def is_late(self, now: float, deadlines: Deadlines) -> bool:
        """Whether the worker keeps the sequence waiting for longer than it may."""
        if self.last_token > self.assigned:
            return now - self.last_token > self.patience * deadlines.first_token_seconds
        if self.started:
            return now - self.started > self.patience * deadlines.first_token_seconds
        return now - self.assigned > self.patience * deadlines.started_seconds

    def mend(self, metrics: pb.PerfMetrics) -> None:
        """The last worker knows when it took the item itself; when that began, this router knows best."""
        to_unix = time.time() - asyncio.get_running_loop().time()
        metrics.arrival_time_ns = int((self.arrival + to_unix) * 1e9)
        if self.first_token:
            metrics.first_token_time_ns = int((self.first_token + to_unix) * 1e9)
            metrics.first_scheduled_time_ns = min(
                metrics.first_scheduled_time_ns, metrics.first_token_time_ns
            )
