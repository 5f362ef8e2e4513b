"""The receiver's lease: blocks reserved for KV that another worker computes.

    RESERVED ──Attach──▶ FETCHING ──all parts, commit mark, confirmation──▶ COMPLETE ──▶ CONSUMED
        │                    │                                                 │
        └────────────────────┴── failure, release, expiry, router lost ────────┴──▶ CLOSED
                             └── the same while a read may still write ──▶ QUARANTINED ──▶ CLOSED

The blocks belong to the lease until `Consume` gives them to the sequence or `FreeBlocks` to the pool; one of the two
happens exactly once. A read cannot be aborted, so blocks are freed only after the end of every started read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem
from trtmesh.engine.kv_memory import Content


class Phase(Enum):
    """What the blocks of the lease are for."""

    RESERVED = "reserved"
    FETCHING = "fetching"
    COMPLETE = "complete"
    QUARANTINED = "quarantined"
    CONSUMED = "consumed"
    CLOSED = "closed"


HELD = frozenset({Phase.RESERVED, Phase.FETCHING, Phase.COMPLETE})
"""Phases without an outcome."""


@dataclass(frozen=True, slots=True)
class ReceiverLease:
    """A granted lease; the blocks are already allocated."""

    phase: Phase = Phase.RESERVED
    needs_confirmation: bool = False
    """Whether the sender's memory is read directly: the sender then confirms that it held the blocks to the end."""
    announced: int = 0
    """Parts announced by the sender."""
    reading: frozenset[int] = frozenset()
    """Parts whose reads may still write to the blocks."""
    mark: CommitMark | None = None
    has_asked: bool = False
    """Whether the sender was asked for the confirmation."""
    wanted: Content | None = None
    """The tokens of the sequence that waits for the KV; None before the submit."""
    outcome: Outcome | None = None

    @property
    def expires(self) -> bool:
        """Whether the lease ends unless it is renewed."""
        return self.phase in HELD


@dataclass(frozen=True, slots=True)
class Attach:
    """The router names a compatible sender."""

    needs_confirmation: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """The router names a sender whose KV this worker cannot use."""


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
class Confirmed:
    """The sender held the blocks until all reads had ended."""


@dataclass(frozen=True, slots=True)
class FetchLost:
    """The fetch broke, or the sender aborted it."""


@dataclass(frozen=True, slots=True)
class Bind:
    """The router submits the sequence that continues from the KV."""

    content: Content


@dataclass(frozen=True, slots=True)
class Release:
    """The router needs the lease no longer, stopped the sequence, or is lost."""


@dataclass(frozen=True, slots=True)
class Expire:
    """Nobody renewed the lease in time."""


Event = (
    Attach
    | Refuse
    | PartReady
    | ReadEnded
    | Committed
    | Confirmed
    | FetchLost
    | Bind
    | Release
    | Expire
)


@dataclass(frozen=True, slots=True)
class OpenFetch:
    """Opens the fetch at the sender."""


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Starts to read a part into the blocks."""

    part: int


@dataclass(frozen=True, slots=True)
class SendReceived:
    """Tells the sender that all reads have ended."""


@dataclass(frozen=True, slots=True)
class CloseFetch:
    """Closes the fetch; nothing sent through it is processed afterwards."""


@dataclass(frozen=True, slots=True)
class Consume:
    """Gives the blocks to the sequence, with their KV computed."""


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Returns the blocks to the pool."""


@dataclass(frozen=True, slots=True)
class EndSequence:
    """Ends the waiting sequence: cancelled without a problem, else failed."""

    problem: Problem | None


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tells the router that no sequence can be submitted with the lease."""

    problem: Problem


@dataclass(frozen=True, slots=True)
class RefuseSequence:
    """Fails a sequence submitted with a lease that has ended or has a sequence."""


Action = (
    OpenFetch
    | ReadPart
    | SendReceived
    | CloseFetch
    | Consume
    | FreeBlocks
    | EndSequence
    | ReportFailure
    | RefuseSequence
)
Transition = tuple[ReceiverLease, tuple[Action, ...]]


def advance(lease: ReceiverLease, event: Event) -> Transition:
    """The lease after an event, and what to do, in order."""
    if isinstance(event, ReadEnded):
        return _on_read_ended(lease, event)
    if isinstance(event, Bind):
        return _on_bind(lease, event.content)
    if lease.phase not in HELD:
        return lease, ()
    match event:
        case Release():
            return _end(lease, Outcome.RELEASED)
        case Expire():
            return _end(lease, Outcome.EXPIRED, Problem.EXPIRED)
        case Attach() | Refuse():
            return _on_sender(lease, event)
    return _on_fetch(lease, event) if lease.phase is Phase.FETCHING else (lease, ())


def _on_sender(lease: ReceiverLease, event: Attach | Refuse) -> Transition:
    if lease.phase is not Phase.RESERVED:
        return lease, ()
    if isinstance(event, Refuse):
        return _fail(lease, Problem.INCOMPATIBLE)
    fetching = replace(lease, phase=Phase.FETCHING, needs_confirmation=event.needs_confirmation)
    return fetching, (OpenFetch(),)


def _on_fetch(
    lease: ReceiverLease, event: PartReady | Committed | Confirmed | FetchLost
) -> Transition:
    match event:
        case PartReady(part):
            return _on_part(lease, part)
        case Committed(mark):
            return _on_mark(lease, mark)
        case Confirmed():
            return _complete(lease) if lease.has_asked else _fail(lease, Problem.PROTOCOL)
        case FetchLost():
            return _fail(lease, Problem.PEER_LOST)


def _on_part(lease: ReceiverLease, part: int) -> Transition:
    if part < lease.announced:
        return lease, ()
    if part > lease.announced or lease.mark is not None:
        return _fail(lease, Problem.PROTOCOL)
    reading = replace(lease, announced=part + 1, reading=lease.reading | {part})
    return reading, (ReadPart(part),)


def _on_mark(lease: ReceiverLease, mark: CommitMark) -> Transition:
    if lease.mark is not None and lease.mark == mark:
        return lease, ()
    if lease.mark is not None or mark.parts != lease.announced:
        return _fail(lease, Problem.PROTOCOL)
    return _progress(replace(lease, mark=mark))


def _on_read_ended(lease: ReceiverLease, event: ReadEnded) -> Transition:
    lease = replace(lease, reading=lease.reading - {event.part})
    if lease.phase is Phase.QUARANTINED and not lease.reading:
        return replace(lease, phase=Phase.CLOSED), (FreeBlocks(),)
    if lease.phase is not Phase.FETCHING:
        return lease, ()
    return _fail(lease, event.problem) if event.problem else _progress(lease)


def _on_bind(lease: ReceiverLease, content: Content) -> Transition:
    if lease.phase not in HELD or lease.wanted is not None:
        return lease, (RefuseSequence(),)
    bound = replace(lease, wanted=content)
    return _consume(bound) if lease.phase is Phase.COMPLETE else (bound, ())


def _progress(lease: ReceiverLease) -> Transition:
    """Continues once all parts are read and committed."""
    if lease.mark is None or lease.reading:
        return lease, ()
    if not lease.needs_confirmation:
        return _complete(lease, SendReceived())
    return replace(lease, has_asked=True), (SendReceived(),)


def _complete(lease: ReceiverLease, *before: Action) -> Transition:
    complete = replace(lease, phase=Phase.COMPLETE)
    actions = (*before, CloseFetch())
    if lease.wanted is None:
        return complete, actions
    consumed, more = _consume(complete)
    return consumed, actions + more


def _consume(lease: ReceiverLease) -> Transition:
    """Gives complete blocks to the waiting sequence."""
    if lease.mark is None or lease.wanted != lease.mark.content:
        return _fail(lease, Problem.WRONG_TOKENS)
    return replace(lease, phase=Phase.CONSUMED, outcome=Outcome.CONSUMED), (Consume(),)


def _fail(lease: ReceiverLease, problem: Problem) -> Transition:
    return _end(lease, Outcome.RELEASED, problem)


def _end(lease: ReceiverLease, outcome: Outcome, problem: Problem | None = None) -> Transition:
    """Ends a held lease: closes the fetch, tells the router, and frees the blocks once nothing writes to them."""
    actions: list[Action] = []
    if lease.phase is Phase.FETCHING:
        actions.append(CloseFetch())
    if lease.wanted is not None:
        actions.append(EndSequence(problem))
    elif problem is not None:
        actions.append(ReportFailure(problem))
    phase = Phase.QUARANTINED if lease.reading else Phase.CLOSED
    if phase is Phase.CLOSED:
        actions.append(FreeBlocks())
    return replace(lease, phase=phase, outcome=outcome), tuple(actions)
