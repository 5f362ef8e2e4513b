"""The receiver's lease: blocks reserved for the KV of another worker.

    RESERVED ──Attach──▶ FETCHING ──all parts, commit mark, confirmation──▶ COMPLETE ──▶ CONSUMED
        │                    │                                                 │
        └────────────────────┴── failure, release, expiry, router lost ────────┴──▶ CLOSED
                             └── the same while a read may still write ──▶ QUARANTINED ──▶ CLOSED

The blocks belong to the lease until CONSUME gives them to the sequence or FREE_BLOCKS to the pool; exactly one of the
two happens, once. A read cannot be aborted, so blocks are freed only after the end of every started read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from trtmesh.engine.backend import Content
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem


class ReceiverPhase(Enum):
    """The use of the lease's blocks."""

    RESERVED = "reserved"
    FETCHING = "fetching"
    COMPLETE = "complete"
    QUARANTINED = "quarantined"
    CONSUMED = "consumed"
    CLOSED = "closed"


HELD = frozenset({ReceiverPhase.RESERVED, ReceiverPhase.FETCHING, ReceiverPhase.COMPLETE})
"""Phases without an outcome."""


@dataclass(frozen=True, slots=True)
class ReceiverLease:
    """A granted lease; the blocks are already allocated."""

    phase: ReceiverPhase = ReceiverPhase.RESERVED
    needs_confirmation: bool = False
    """Whether the sender's memory is read directly: the sender then confirms that it held the blocks to the end."""
    announced: int = 0
    """Parts announced by the sender."""
    reading: frozenset[int] = frozenset()
    """Parts with reads that may still write to the blocks."""
    mark: CommitMark | None = None
    has_asked: bool = False
    """Whether the sender was asked for the confirmation."""
    wanted: Content | None = None
    """The tokens of the waiting sequence; None before the submit."""
    outcome: Outcome | None = None

    @property
    def expires(self) -> bool:
        """Whether the lease ends without renewals."""
        return self.phase in HELD


class ReceiverEvent(Enum):
    """Events of a receiver's lease without content; the others are classes."""

    REFUSED = "refused"
    """The router names a sender with KV of no use to this worker."""
    CONFIRMED = "confirmed"
    """The sender held the blocks until all reads had ended."""
    FETCH_LOST = "fetch_lost"
    """The fetch broke, or was aborted by the sender."""
    RELEASED = "released"
    """The router needs the lease no longer, stopped the sequence, or is lost."""
    EXPIRED = "expired"
    """Nobody renewed the lease in time."""


@dataclass(frozen=True, slots=True)
class Attach:
    """The router names a compatible sender."""

    needs_confirmation: bool


@dataclass(frozen=True, slots=True)
class PartReady:
    """The sender announces a part, in order."""

    part: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read ended: nothing writes to the blocks of the part any more."""

    part: int
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The sender's commit mark, after the last part."""

    mark: CommitMark


@dataclass(frozen=True, slots=True)
class Bind:
    """The router submits the sequence for the KV."""

    content: Content


class ReceiverAction(Enum):
    """Actions for a receiver's lease without content; the others are classes."""

    OPEN_FETCH = "open_fetch"
    """Opens the fetch at the sender."""
    SEND_RECEIVED = "send_received"
    """Reports the end of all reads to the sender."""
    CLOSE_FETCH = "close_fetch"
    """Closes the fetch; later messages are ignored."""
    CONSUME = "consume"
    """Gives the blocks to the sequence, with their KV computed."""
    FREE_BLOCKS = "free_blocks"
    """Returns the blocks to the pool."""
    REFUSE_SEQUENCE = "refuse_sequence"
    """Fails a sequence submitted with an ended or used lease."""


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Starts to read a part into the blocks."""

    part: int


@dataclass(frozen=True, slots=True)
class StopTarget:
    """Ends the waiting sequence: cancelled without a problem, else failed."""

    problem: Problem | None


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tells the router to submit no sequence with the lease."""

    problem: Problem


AnyReceiverEvent = ReceiverEvent | Attach | PartReady | ReadEnded | Committed | Bind
AnyReceiverAction = ReceiverAction | ReadPart | StopTarget | ReportFailure
ReceiverTransition = tuple[ReceiverLease, tuple[AnyReceiverAction, ...]]


def advance(lease: ReceiverLease, event: AnyReceiverEvent) -> ReceiverTransition:
    """Returns the lease after an event, and the actions in order."""
    if isinstance(event, ReadEnded):
        return _on_read_ended(lease, event)
    if isinstance(event, Bind):
        return _on_bind(lease, event.content)
    if lease.phase not in HELD:
        return lease, ()
    if event is ReceiverEvent.RELEASED:
        return _end(lease, Outcome.RELEASED)
    if event is ReceiverEvent.EXPIRED:
        return _end(lease, Outcome.EXPIRED, Problem.EXPIRED)
    if lease.phase is ReceiverPhase.RESERVED:
        return _on_sender(lease, event)
    return _on_fetch(lease, event) if lease.phase is ReceiverPhase.FETCHING else (lease, ())


def _on_sender(lease: ReceiverLease, event: AnyReceiverEvent) -> ReceiverTransition:
    if event is ReceiverEvent.REFUSED:
        return _fail(lease, Problem.INCOMPATIBLE)
    if not isinstance(event, Attach):
        return lease, ()
    confirms = event.needs_confirmation
    fetching = replace(lease, phase=ReceiverPhase.FETCHING, needs_confirmation=confirms)
    return fetching, (ReceiverAction.OPEN_FETCH,)


def _on_fetch(lease: ReceiverLease, event: AnyReceiverEvent) -> ReceiverTransition:
    match event:
        case PartReady(part):
            return _on_part(lease, part)
        case Committed(mark):
            return _on_mark(lease, mark)
        case ReceiverEvent.CONFIRMED:
            return _complete(lease) if lease.has_asked else _fail(lease, Problem.PROTOCOL)
        case ReceiverEvent.FETCH_LOST:
            return _fail(lease, Problem.PEER_LOST)
    return lease, ()


def _on_part(lease: ReceiverLease, part: int) -> ReceiverTransition:
    if part < lease.announced:
        return lease, ()
    if part > lease.announced or lease.mark is not None:
        return _fail(lease, Problem.PROTOCOL)
    reading = replace(lease, announced=part + 1, reading=lease.reading | {part})
    return reading, (ReadPart(part),)


def _on_mark(lease: ReceiverLease, mark: CommitMark) -> ReceiverTransition:
    if lease.mark is not None and lease.mark == mark:
        return lease, ()
    if lease.mark is not None or mark.parts != lease.announced:
        return _fail(lease, Problem.PROTOCOL)
    return _progress(replace(lease, mark=mark))


def _on_read_ended(lease: ReceiverLease, event: ReadEnded) -> ReceiverTransition:
    lease = replace(lease, reading=lease.reading - {event.part})
    if lease.phase is ReceiverPhase.QUARANTINED and not lease.reading:
        return replace(lease, phase=ReceiverPhase.CLOSED), (ReceiverAction.FREE_BLOCKS,)
    if lease.phase is not ReceiverPhase.FETCHING:
        return lease, ()
    return _fail(lease, event.problem) if event.problem else _progress(lease)


def _on_bind(lease: ReceiverLease, content: Content) -> ReceiverTransition:
    if lease.phase not in HELD or lease.wanted is not None:
        return lease, (ReceiverAction.REFUSE_SEQUENCE,)
    bound = replace(lease, wanted=content)
    return _consume(bound) if lease.phase is ReceiverPhase.COMPLETE else (bound, ())


def _progress(lease: ReceiverLease) -> ReceiverTransition:
    """Continues once all parts are read and committed."""
    if lease.mark is None or lease.reading:
        return lease, ()
    if not lease.needs_confirmation:
        return _complete(lease, ReceiverAction.SEND_RECEIVED)
    return replace(lease, has_asked=True), (ReceiverAction.SEND_RECEIVED,)


def _complete(lease: ReceiverLease, *before: AnyReceiverAction) -> ReceiverTransition:
    complete = replace(lease, phase=ReceiverPhase.COMPLETE)
    actions = (*before, ReceiverAction.CLOSE_FETCH)
    if lease.wanted is None:
        return complete, actions
    consumed, more = _consume(complete)
    return consumed, actions + more


def _consume(lease: ReceiverLease) -> ReceiverTransition:
    """Gives complete blocks to the waiting sequence."""
    if lease.mark is None or lease.wanted != lease.mark.content:
        return _fail(lease, Problem.WRONG_TOKENS)
    return replace(lease, phase=ReceiverPhase.CONSUMED, outcome=Outcome.CONSUMED), (
        ReceiverAction.CONSUME,
    )


def _fail(lease: ReceiverLease, problem: Problem) -> ReceiverTransition:
    return _end(lease, Outcome.RELEASED, problem)


def _end(
    lease: ReceiverLease, outcome: Outcome, problem: Problem | None = None
) -> ReceiverTransition:
    """Ends a held lease: closes the fetch, tells the router, and frees the blocks once nothing writes to them."""
    actions: list[AnyReceiverAction] = []
    if lease.phase is ReceiverPhase.FETCHING:
        actions.append(ReceiverAction.CLOSE_FETCH)
    if lease.wanted is not None:
        actions.append(StopTarget(problem))
    elif problem is not None:
        actions.append(ReportFailure(problem))
    phase = ReceiverPhase.QUARANTINED if lease.reading else ReceiverPhase.CLOSED
    if phase is ReceiverPhase.CLOSED:
        actions.append(ReceiverAction.FREE_BLOCKS)
    return replace(lease, phase=phase, outcome=outcome), tuple(actions)
