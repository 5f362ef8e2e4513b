"""The sender's lease of a handoff by state: KV that the backend keeps, and its library moves.

    COMPUTING ──HandedOver──▶ KEPT ──Release, consumed──▶ CLOSED
        │                      │
        └── end, failure, release, expiry, router lost ──▶ CLOSED

Every end drops the KV, also before the handoff: the sequence may have been handed over in a step whose output is under
way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from trtmesh.engine.handoff.lease import Outcome


class Phase(Enum):
    """Who has the KV."""

    COMPUTING = "computing"
    KEPT = "kept"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class StateLease:
    """A granted lease; its sequence waits or is computed."""

    phase: Phase = Phase.COMPUTING
    outcome: Outcome | None = None

    @property
    def expires(self) -> bool:
        """Whether the lease ends unless it is renewed."""
        return self.phase is not Phase.CLOSED


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The sequence ended with its handoff: the backend keeps the KV."""

    can_travel: bool = True
    """Whether the state is one that may travel."""


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The sequence ended before its handoff."""


@dataclass(frozen=True, slots=True)
class Release:
    """The router needs the lease no longer, or is lost."""

    consumed: bool = False
    """Whether the receiver generates."""


@dataclass(frozen=True, slots=True)
class Expire:
    """Nobody renewed the lease in time, or the backend keeps the KV no longer."""


Event = HandedOver | SequenceEnded | Release | Expire


class Action(Enum):
    """What the worker does for a lease."""

    STOP_SEQUENCE = "stop_sequence"
    DROP = "drop"
    """Has the backend free the KV; without effect where it keeps none."""


Transition = tuple[StateLease, tuple[Action, ...]]


def advance(lease: StateLease, event: Event) -> Transition:
    """The lease after an event, and what to do, in order."""
    if lease.phase is Phase.CLOSED:
        return lease, (Action.DROP,) if isinstance(event, HandedOver) else ()
    match event:
        case HandedOver(can_travel=True):
            return replace(lease, phase=Phase.KEPT), ()
        case HandedOver() | SequenceEnded():
            return _end(lease, Outcome.RELEASED, Action.DROP)
        case Release(consumed):
            is_used = consumed and lease.phase is Phase.KEPT
            return _stop(lease, Outcome.CONSUMED if is_used else Outcome.RELEASED)
        case Expire():
            return _stop(lease, Outcome.EXPIRED)


def _stop(lease: StateLease, outcome: Outcome) -> Transition:
    """Ends a lease, and the sequence that it is for."""
    stop = (Action.STOP_SEQUENCE,) if lease.phase is Phase.COMPUTING else ()
    return _end(lease, outcome, *stop, Action.DROP)


def _end(lease: StateLease, outcome: Outcome, *actions: Action) -> Transition:
    return replace(lease, phase=Phase.CLOSED, outcome=outcome), actions
