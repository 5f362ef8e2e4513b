"""Whether a worker failed so often that it should rest.

Only faults before an item's first token count: what fails later has shown that the worker works. What the caller did
wrong and what a busy worker refuses count neither as fault nor as success. That an open breaker keeps nothing out when
all are open is the placement's rule, not the breaker's.
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
"""Faults that follow each other so closely have one cause: a lost stream fails every item on it."""


class Breaker:
    """Closed; after 3 successive faults open for 5 s, doubled with each further fault up to 60 s; then half-open: one
    item is let through at a time, and its first token closes the breaker. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.faults = 0
        """Successive ones."""
        self._last_error = ""
        self._last_fault = float("-inf")
        self._open_until = float("-inf")
        self._probing = False

    @property
    def closed(self) -> bool:
        return self.faults < FAULTS_TO_OPEN

    @property
    def problem(self) -> str:
        """Why it is not closed; '' when it is."""
        return "" if self.closed else f"{self.faults} faults in a row, the last: {self._last_error}"

    def state(self, now: float) -> BreakerState:
        if self.closed:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def is_open(self, now: float) -> bool:
        """Whether the worker should get nothing now: it rests, or its probe is on its way."""
        return not self.closed and (now < self._open_until or self._probing)

    def dispatched(self, now: float) -> None:
        """An item goes to the worker; in the half-open state it is the probe."""
        if not self.closed and now >= self._open_until:
            self._probing = True

    def succeeded(self) -> None:
        """A first token came."""
        self.faults = 0
        self._probing = False
        self._open_until = float("-inf")

    def ended_neutrally(self) -> None:
        """An item was over without a first token and without a fault."""
        self._probing = False

    def failed(self, now: float, error: TrtmeshError) -> None:
        """An item met a fault before its first token."""
        if now - self._last_fault < INCIDENT_SECONDS:
            self._last_fault = now
            return
        self._last_fault = now
        self.faults += 1
        self._last_error = error.message
        self._probing = False
        if not self.closed:
            # Beyond the cap the doublings would one day be more than a float holds.
            doublings = min(self.faults - FAULTS_TO_OPEN, MOST_DOUBLINGS)
            self._open_until = now + min(FIRST_REST_SECONDS * 2.0**doublings, LONGEST_REST_SECONDS)
