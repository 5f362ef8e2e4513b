"""Liveness as progress: steps must continue while there is work."""

from __future__ import annotations

from trtmesh.engine.backend import BackendStats


class Progress:
    """Judges a series of stats; times are seconds of one monotonic clock."""

    def __init__(self, step_gap_seconds: float) -> None:
        self._step_gap_seconds = step_gap_seconds
        self._step_count = -1
        self._since: float | None = None

    def problem(self, stats: BackendStats, now: float) -> str | None:
        """Describes a stall; None while steps continue or no sequence waits."""
        waiting = stats.running_sequences + stats.waiting_sequences
        if not waiting or stats.step_count != self._step_count or self._since is None:
            self._step_count = stats.step_count
            self._since = now
            return None
        if now - self._since < self._step_gap_seconds:
            return None
        # The text stays the same during a stall and is reported once.
        return (
            f"{self._step_gap_seconds:g} s without a step after number {stats.step_count}"
            " though sequences wait for one"
        )
