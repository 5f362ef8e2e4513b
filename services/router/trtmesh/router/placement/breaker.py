"""Whether a worker failed so often that it should rest.

Only faults before an item's first token count: what fails later has shown that the worker works. What the caller did
wrong and what a busy worker refuses count neither as fault nor as success. That an open breaker keeps nothing out when
all are open is the placement's rule, not the breaker's.
"""

from __future__ import annotations

from trtmesh.chassis.errors import InternalError, TrtmeshError, WorkerLost

FAULTS_TO_OPEN = 3
FIRST_REST_SECONDS = 5.0
LONGEST_REST_SECONDS = 60.0

INCIDENT_SECONDS = 0.1
"""Faults that follow each other so closely have one cause: a lost stream fails every item on it."""

FAULTS = (InternalError, WorkerLost)


def is_fault(error: TrtmeshError) -> bool:
    """Whether the worker is to blame; false for what the caller did wrong and for back-pressure."""
    return isinstance(error, FAULTS)


class Breaker:
    """Closed; after 3 successive faults open for 5 s, doubled with each further fault up to 60 s; then half-open: one
    item is let through at a time, and its first token closes the breaker. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._faults = 0
        self._last_fault = float("-inf")
        self._open_until = float("-inf")
        self._probing = False

    def is_open(self, now: float) -> bool:
        return now < self._open_until or (self._faults >= FAULTS_TO_OPEN and self._probing)

    def dispatched(self, now: float) -> None:
        """An item goes to the worker; in the half-open state it is the probe."""
        if self._faults >= FAULTS_TO_OPEN and now >= self._open_until:
            self._probing = True

    def succeeded(self) -> None:
        """A first token came."""
        self._faults = 0
        self._probing = False
        self._open_until = float("-inf")

    def ended_neutrally(self) -> None:
        """An item was over without a first token and without a fault."""
        self._probing = False

    def failed(self, now: float) -> None:
        """An item met a fault before its first token."""
        if now - self._last_fault < INCIDENT_SECONDS:
            self._last_fault = now
            return
        self._last_fault = now
        self._faults += 1
        self._probing = False
        if self._faults >= FAULTS_TO_OPEN:
            rest = FIRST_REST_SECONDS * 2.0 ** (self._faults - FAULTS_TO_OPEN)
            self._open_until = now + min(rest, LONGEST_REST_SECONDS)
