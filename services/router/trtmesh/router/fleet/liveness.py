"""Judges whether a worker is alive by reports and steps, never by an open port.

Time is counted in ticks of the router's own event loop, so that a stalled router blames no worker.
"""

from __future__ import annotations

import math

from trtmesh.router.links.deadlines import Deadlines
from trtmesh.v1 import engine_pb2 as pb

TICK_SECONDS = 0.1

MISSED_LOADS = 5
"""Missing load reports tolerated even with a short `silence_seconds`."""

SLOWER_THAN_BEFORE = 4
"""Allowed length of a step relative to the longest recent step, even with a short `step_gap_seconds`."""

FADING = 0.999
"""Decay of the longest recent step per tick: half after a minute."""


class LivenessMonitor:
    """Judges a worker from the opening of the stream."""

    def __init__(self, deadlines: Deadlines, load_interval_seconds: float = 0.0) -> None:
        self._deadlines = deadlines
        self._most_silent = _ticks(
            max(deadlines.silence_seconds, MISSED_LOADS * load_interval_seconds)
        )
        self._silent = 0
        self._was_silent = False
        self._step_count = -1
        self._without_step = 0
        self._longest_step = 0.0
        self._busy = False
        self._submitted = 0
        self._unread = 0
        self._received = 0

    @property
    def unread(self) -> int:
        """Submit commands without a confirmed read."""
        return max(0, self._submitted - self._received)

    @property
    def silent_seconds(self) -> float:
        """Time since the last message, in whole ticks."""
        return self._silent * TICK_SECONDS

    def heard(self) -> None:
        self._silent = 0

    def submitted(self) -> None:
        """A submit command was put on the stream."""
        self._submitted += 1

    def on_load(self, load: pb.Load) -> None:
        if load.step_count != self._step_count or not self._busy:
            if self._busy and not self._was_silent:
                # After a silence the step count shows a broken network, not a slow step.
                self._longest_step = max(self._longest_step, self._without_step)
            self._was_silent = False
            self._step_count = load.step_count
            self._without_step = 0
        self._busy = load.running_sequences + load.waiting_sequences > 0
        received = load.received_items if load.HasField("received_items") else self._submitted
        if received != self._received or received == self._submitted:
            self._received = received
            self._unread = 0

    def tick(self) -> str:
        """Returns the worker's problem, or ''. Called every TICK_SECONDS."""
        self._silent += 1
        self._was_silent = self._was_silent or self._silent > self._most_silent
        self._longest_step *= FADING
        if self._busy:
            self._without_step += 1
        if self.unread:
            self._unread += 1
        return self._problem()

    def _problem(self) -> str:
        if self._silent > self._most_silent:
            return f"it was silent for {self._most_silent * TICK_SECONDS:g} s"
        if self._unread > self._most_silent:
            return f"it did not read an item for {self._most_silent * TICK_SECONDS:g} s"
        most = max(
            _ticks(self._deadlines.step_gap_seconds), SLOWER_THAN_BEFORE * self._longest_step
        )
        if self._busy and self._without_step > most:
            return (
                f"it made no step for {most * TICK_SECONDS:g} s after number {self._step_count},"
                " though sequences wait for one"
            )
        return ""


def _ticks(seconds: float) -> int:
    return math.ceil(seconds / TICK_SECONDS)
