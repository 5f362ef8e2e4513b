"""Takes a worker out of placement after repeated faults.

Only faults before an item's first token count; errors of the caller and back-pressure count neither as fault nor as
success. If all breakers are open, placement ignores them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from trtmesh.chassis.errors import TrtmeshError

BreakerState: TypeAlias = Literal["closed", "open", "half_open"]

FAULTS_TO_OPEN = 3
FIRST_REST_SECONDS = 5.0
LONGEST_REST_SECONDS = 60.0
MOST_DOUBLINGS = 10

INCIDENT_SECONDS = 0.1
"""Faults within this time count once, as after the loss of a stream with many items."""


class Breaker:
    """A circuit breaker: three successive faults open the breaker for 5 s, doubled by each further fault up to 60 s.
    A half-open breaker admits a single item at a time, and a first token closes it. Times are seconds of any clock."""

    def __init__(self) -> None:
        self.faults = 0
        """Successive faults."""
        self._last_error = ""
        self._last_fault = float("-inf")
        self._open_until = float("-inf")
        self._probing = False

    @property
    def closed(self) -> bool:
        return self.faults < FAULTS_TO_OPEN

    @property
    def problem(self) -> str:
        """The cause of an open breaker, or ''."""
        return "" if self.closed else f"{self.faults} faults in a row, the last: {self._last_error}"

    def state(self, now: float) -> BreakerState:
        if self.closed:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def is_open(self, now: float) -> bool:
        """Whether the worker rests or has a probe already."""
        return not self.closed and (now < self._open_until or self._probing)

    def dispatched(self, now: float) -> None:
        """An item was dispatched; in the half-open state as the probe."""
        if not self.closed and now >= self._open_until:
            self._probing = True

    def succeeded(self) -> None:
        """A first token arrived."""
        self.faults = 0
        self._probing = False
        self._open_until = float("-inf")

    def ended_neutrally(self) -> None:
        """An item ended without a first token and without a fault."""
        self._probing = False

    def failed(self, now: float, error: TrtmeshError) -> None:
        """An item met a fault before the first token."""
        if now - self._last_fault < INCIDENT_SECONDS:
            self._last_fault = now
            return
        self._last_fault = now
        self.faults += 1
        self._last_error = error.message
        self._probing = False
        if not self.closed:
            # Capped, or the power would overflow.
            doublings = min(self.faults - FAULTS_TO_OPEN, MOST_DOUBLINGS)
            self._open_until = now + min(FIRST_REST_SECONDS * 2.0**doublings, LONGEST_REST_SECONDS)
