"""The sender's lease: KV of a sequence to be continued by another worker.

    COMPUTING ──Commit──▶ COMMITTED ──RECEIVED, CONSUMED──▶ CLOSED
        │                     │
        └── failure, release, expiry, router or receiver lost ──▶ CLOSED

Until `Commit` the KV belongs to the sequence, then to the lease until FREE_KV. The sender waits for nobody at the end
of a lease: the receiver only reads, and never uses the result of a late read, because an ended lease sends neither
commit mark nor confirmation.

A receiver fetches the blocks of a pool. There is no fetch where a library moves the KV: the router then reports when
the receiver generates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem


class SenderPhase(Enum):
    """The owner of the KV: the sequence, the lease, or neither."""

    COMPUTING = "computing"
    COMMITTED = "committed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SenderLease:
    """A granted lease; the sequence waits or is computed."""

    phase: SenderPhase = SenderPhase.COMPUTING
    is_fetched: bool = False
    """Whether the receiver fetches; a lease has at most one fetch."""
    computed: int = 0
    """Parts ready to be read."""
    mark: CommitMark | None = None
    outcome: Outcome | None = None

    @property
    def expires(self) -> bool:
        """Whether the lease ends without renewals."""
        return self.phase is not SenderPhase.CLOSED


class SenderEvent(Enum):
    """Events of a sender's lease. `Commit` is another."""

    FETCH_OPENED = "fetch_opened"
    PART_COMPUTED = "part_computed"
    """The next part is final."""
    RECEIVED = "received"
    """The receiver has ended all reads."""
    FETCH_LOST = "fetch_lost"
    """The fetch ended before the receiver had everything."""
    SEQUENCE_ENDED = "sequence_ended"
    """The sequence ended before the handoff; the router knows, and the blocks are free."""
    RELEASED = "released"
    """The router needs the lease no longer, or is lost."""
    CONSUMED = "consumed"
    """The router needs the lease no longer, because the receiver generates."""
    EXPIRED = "expired"
    """Nobody renewed the lease in time, or the backend keeps the KV no longer."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The sequence stopped at the handoff; the KV is final."""

    mark: CommitMark | None = None
    """None where the backend keeps the KV."""


class SenderAction(Enum):
    """Actions for a sender's lease without content; the others are classes."""

    SEND_CONFIRMED = "send_confirmed"
    """Confirms that the blocks were held to the end of the receiver's last read; ends the fetch."""
    ABORT_FETCH = "abort_fetch"
    """Ends the fetch with an error."""
    REFUSE_FETCH = "refuse_fetch"
    """Refuses a second fetch, or a fetch of an ended lease."""
    TAKE_KV = "take_kv"
    """Takes the KV over from the sequence."""
    FREE_KV = "free_kv"
    """Frees the KV; published blocks stay in the pool for reuse."""


@dataclass(frozen=True, slots=True)
class AnnouncePart:
    """Announces a part to the receiver, or sends the part."""

    part: int


@dataclass(frozen=True, slots=True)
class SendMark:
    """Sends the commit mark."""

    mark: CommitMark


@dataclass(frozen=True, slots=True)
class StopSource:
    """Ends the sequence: cancelled without a problem, else failed. Frees the KV, even after a handoff in a step with
    undelivered output."""

    problem: Problem | None


AnySenderEvent = SenderEvent | Commit
AnySenderAction = SenderAction | AnnouncePart | SendMark | StopSource
SenderTransition = tuple[SenderLease, tuple[AnySenderAction, ...]]


def advance(lease: SenderLease, event: AnySenderEvent) -> SenderTransition:
    """Returns the lease after an event, and the actions in order."""
    if event is SenderEvent.FETCH_OPENED:
        return _on_fetch(lease)
    if lease.phase is SenderPhase.CLOSED:
        return lease, (SenderAction.FREE_KV,) if isinstance(event, Commit) else ()
    match event:
        case SenderEvent.PART_COMPUTED:
            announced = (AnnouncePart(lease.computed),) if lease.is_fetched else ()
            return replace(lease, computed=lease.computed + 1), announced
        case Commit(mark):
            return _on_commit(lease, mark)
        case SenderEvent.RECEIVED:
            return _on_received(lease)
        case SenderEvent.FETCH_LOST:
            unfetched = replace(lease, is_fetched=False)
            return _end(unfetched, Outcome.RELEASED, Problem.PEER_LOST)
        case SenderEvent.SEQUENCE_ENDED:
            return _on_sequence_ended(lease)
        case SenderEvent.RELEASED:
            return _end(lease, Outcome.RELEASED)
        case SenderEvent.CONSUMED:
            is_used = lease.phase is SenderPhase.COMMITTED
            return _end(lease, Outcome.CONSUMED if is_used else Outcome.RELEASED)
        case SenderEvent.EXPIRED:
            return _end(lease, Outcome.EXPIRED, Problem.EXPIRED)


def _on_fetch(lease: SenderLease) -> SenderTransition:
    if lease.phase is SenderPhase.CLOSED or lease.is_fetched:
        return lease, (SenderAction.REFUSE_FETCH,)
    actions: list[AnySenderAction] = [AnnouncePart(part) for part in range(lease.computed)]
    if lease.mark is not None:
        actions.append(SendMark(lease.mark))
    return replace(lease, is_fetched=True), tuple(actions)


def _on_commit(lease: SenderLease, mark: CommitMark | None) -> SenderTransition:
    committed = replace(lease, phase=SenderPhase.COMMITTED, mark=mark)
    if lease.is_fetched and mark is not None:
        return committed, (SenderAction.TAKE_KV, SendMark(mark))
    return committed, (SenderAction.TAKE_KV,)


def _on_received(lease: SenderLease) -> SenderTransition:
    if lease.phase is not SenderPhase.COMMITTED or not lease.is_fetched:
        return _end(lease, Outcome.RELEASED, Problem.PROTOCOL)
    closed = replace(lease, phase=SenderPhase.CLOSED, outcome=Outcome.CONSUMED)
    return closed, (SenderAction.SEND_CONFIRMED, SenderAction.FREE_KV)


def _on_sequence_ended(lease: SenderLease) -> SenderTransition:
    if lease.phase is SenderPhase.COMMITTED:
        return lease, ()
    closed = replace(lease, phase=SenderPhase.CLOSED, outcome=Outcome.RELEASED)
    return closed, (SenderAction.ABORT_FETCH,) if lease.is_fetched else ()


def _end(lease: SenderLease, outcome: Outcome, problem: Problem | None = None) -> SenderTransition:
    """Ends a held lease: aborts the fetch, and frees the KV or ends the sequence."""
    abort = (SenderAction.ABORT_FETCH,) if lease.is_fetched else ()
    is_kept = lease.phase is SenderPhase.COMMITTED
    free = SenderAction.FREE_KV if is_kept else StopSource(problem)
    return replace(lease, phase=SenderPhase.CLOSED, outcome=outcome), (*abort, free)
