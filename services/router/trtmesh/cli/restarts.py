"""Delays between restarts of a process."""

from __future__ import annotations

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 8.0
WINDOW_SECONDS = 60.0


class RestartBudget:
    """Doubles the delay with each restart of the last minute and bounds their number."""

    def __init__(self, most_per_minute: int) -> None:
        self._most = most_per_minute
        self._times: list[float] = []

    def take(self, now: float) -> float:
        """Books a restart and returns the seconds to wait before it."""
        self._times = [time for time in self._times if time > now - WINDOW_SECONDS]
        delay = min(FIRST_DELAY_SECONDS * 2.0 ** len(self._times), LONGEST_DELAY_SECONDS)
        if len(self._times) >= self._most:
            oldest_that_counts = self._times[-self._most]
            delay = max(delay, oldest_that_counts + WINDOW_SECONDS - now)
        self._times.append(now + delay)
        return delay
