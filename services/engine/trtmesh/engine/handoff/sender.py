"""The sender's lease: KV of a sequence that another worker will continue.

    OFFERED ──Commit──▶ COMMITTED ──Received──▶ CLOSED
       │                    │
       └── failure, release, expiry, router or receiver lost ──▶ CLOSED

Until `Commit` the blocks belong to the sequence, then to the lease until `FreeBlocks`. The sender waits for nobody when
a lease ends. Nothing writes to its memory, because the receiver reads, and the result of a late read is never used,
because an ended lease sends neither commit mark nor confirmation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem


class Phase(Enum):
    """Whether the KV is complete."""

    OFFERED = "offered"
    COMMITTED = "committed"
    CLOSED = "closed"


class FetchState(Enum):
    """The receiver's fetch, of which a lease has at most one."""

    AWAITED = "awaited"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class SenderLease:
    """A granted lease; its sequence waits or is computed."""

    phase: Phase = Phase.OFFERED
    fetch: FetchState = FetchState.AWAITED
    computed: int = 0
    """Parts ready to be read."""
    mark: CommitMark | None = None
    outcome: Outcome | None = None

    @property
    def expires(self) -> bool:
        """Whether the lease ends unless it is renewed."""
        return self.phase is not Phase.CLOSED


@dataclass(frozen=True, slots=True)
class FetchOpened:
    """The receiver fetches."""


@dataclass(frozen=True, slots=True)
class PartComputed:
    """The next part is final."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The sequence stopped at its handoff; its KV is final."""

    mark: CommitMark


@dataclass(frozen=True, slots=True)
class Received:
    """The receiver has ended all reads."""


@dataclass(frozen=True, slots=True)
class FetchLost:
    """The fetch ended before the receiver had everything."""


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The sequence ended before its handoff; it has told the router, and freed its blocks."""


@dataclass(frozen=True, slots=True)
class Release:
    """The router needs the lease no longer, or is lost."""


@dataclass(frozen=True, slots=True)
class Expire:
    """Nobody renewed the lease in time."""


Event = (
    FetchOpened | PartComputed | Commit | Received | FetchLost | SequenceEnded | Release | Expire
)


@dataclass(frozen=True, slots=True)
class AnnouncePart:
    """Tells the receiver that a part can be read, or sends it."""

    part: int


@dataclass(frozen=True, slots=True)
class SendMark:
    """Sends the commit mark."""

    mark: CommitMark


@dataclass(frozen=True, slots=True)
class SendConfirmed:
    """Confirms that the blocks were held until the receiver's last read had ended; ends the fetch."""


@dataclass(frozen=True, slots=True)
class AbortFetch:
    """Ends the fetch with an error."""


@dataclass(frozen=True, slots=True)
class RefuseFetch:
    """Refuses a second fetch, or one of a lease that has ended."""


@dataclass(frozen=True, slots=True)
class EndSequence:
    """Ends the sequence, which frees its blocks: cancelled without a problem, else failed."""

    problem: Problem | None


@dataclass(frozen=True, slots=True)
class TakeBlocks:
    """Takes the blocks over from the sequence."""


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Returns the blocks to the pool, where published ones stay for reuse."""


Action = (
    AnnouncePart
    | SendMark
    | SendConfirmed
    | AbortFetch
    | RefuseFetch
    | EndSequence
    | TakeBlocks
    | FreeBlocks
)
Transition = tuple[SenderLease, tuple[Action, ...]]


def advance(lease: SenderLease, event: Event) -> Transition:
    """The lease after an event, and what to do, in order."""
    if isinstance(event, FetchOpened):
        return _on_fetch(lease)
    if lease.phase is Phase.CLOSED:
        return lease, ()
    match event:
        case PartComputed():
            return _on_part(lease)
        case Commit(mark):
            return _on_commit(lease, mark)
        case Received():
            return _on_received(lease)
        case FetchLost():
            return _end(
                replace(lease, fetch=FetchState.AWAITED), Outcome.RELEASED, Problem.PEER_LOST
            )
        case SequenceEnded():
            return _on_sequence_ended(lease)
        case Release():
            return _end(lease, Outcome.RELEASED)
        case Expire():
            return _end(lease, Outcome.EXPIRED, Problem.EXPIRED)


def _on_fetch(lease: SenderLease) -> Transition:
    if lease.phase is Phase.CLOSED or lease.fetch is FetchState.OPEN:
        return lease, (RefuseFetch(),)
    actions: list[Action] = [AnnouncePart(part) for part in range(lease.computed)]
    if lease.mark is not None:
        actions.append(SendMark(lease.mark))
    return replace(lease, fetch=FetchState.OPEN), tuple(actions)


def _on_part(lease: SenderLease) -> Transition:
    computed = replace(lease, computed=lease.computed + 1)
    return computed, (AnnouncePart(lease.computed),) if lease.fetch is FetchState.OPEN else ()


def _on_commit(lease: SenderLease, mark: CommitMark) -> Transition:
    committed = replace(lease, phase=Phase.COMMITTED, mark=mark)
    if lease.fetch is FetchState.OPEN:
        return committed, (TakeBlocks(), SendMark(mark))
    return committed, (TakeBlocks(),)


def _on_received(lease: SenderLease) -> Transition:
    if lease.phase is not Phase.COMMITTED or lease.fetch is not FetchState.OPEN:
        return _end(lease, Outcome.RELEASED, Problem.PROTOCOL)
    closed = replace(lease, phase=Phase.CLOSED, outcome=Outcome.CONSUMED)
    return closed, (SendConfirmed(), FreeBlocks())


def _on_sequence_ended(lease: SenderLease) -> Transition:
    if lease.phase is Phase.COMMITTED:
        return lease, ()
    abort = (AbortFetch(),) if lease.fetch is FetchState.OPEN else ()
    return replace(lease, phase=Phase.CLOSED, outcome=Outcome.RELEASED), abort


def _end(lease: SenderLease, outcome: Outcome, problem: Problem | None = None) -> Transition:
    """Ends a held lease: aborts the fetch, and frees the blocks or ends the sequence that has them."""
    abort = (AbortFetch(),) if lease.fetch is FetchState.OPEN else ()
    free = FreeBlocks() if lease.phase is Phase.COMMITTED else EndSequence(problem)
    return replace(lease, phase=Phase.CLOSED, outcome=outcome), (*abort, free)
