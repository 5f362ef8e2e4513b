"""Machines that break one rule each, and the problem that the search must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from handoff.lane import Bounds, Machines
from trtmesh.engine.handoff import receive_machine as receiving
from trtmesh.engine.handoff import send_machine as sending
from trtmesh.engine.handoff.lease import Outcome
from trtmesh.router.handoffs import machine as routing

State = TypeVar("State")
Event = TypeVar("Event")
Action = TypeVar("Action")

NO_END = "no end is reachable"
READ_WRITES = "a read may write to a block of"
COMPUTES = "a sequence computes on parts"
NO_BLOCK = "has no block for"
BLOCKS = "blocks of"
GOES_ON = "goes on"
TWICE = "used twice"
UNUSED = "from which nothing continued"


# Timers count as faults, and no local sequence competes for blocks: so a broken rule shows in a third of the worlds.
WIDE = Bounds(faults=1, parts=1, timers=False, local=False)
TWO_PARTS = replace(WIDE, parts=2)
LOSSES = Bounds(faults=0, losses=1, parts=1)
STATE = replace(WIDE, kind="state")
STATE_LOSSES = replace(LOSSES, kind="state")


@dataclass(frozen=True)
class Mutation:
    """One broken rule."""

    rule: str
    machines: Machines
    finds: str
    bounds: Bounds = WIDE
    by_timers: bool = False
    """Whether an end may need a timer; most rules must hold without."""
    is_found_by_state: bool = False
    """Whether every run finds it in the fewer worlds of a state, and `make soak` here too."""


def without(
    advance: Callable[[State, Event], tuple[State, tuple[Action, ...]]], *dropped: object
) -> Callable[[State, Event], tuple[State, tuple[Action, ...]]]:
    """A machine that forgets some actions, given as classes or values."""
    classes = tuple(each for each in dropped if isinstance(each, type))

    def forgetful(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
        after, actions = advance(state, event)
        kept = [each for each in actions if not (isinstance(each, classes) or each in dropped)]
        return after, tuple(kept)

    return forgetful


def ignoring(
    advance: Callable[[State, Event], tuple[State, tuple[Action, ...]]], *events: object
) -> Callable[[State, Event], tuple[State, tuple[Action, ...]]]:
    """A machine that ignores some events, given as classes or values."""
    classes = tuple(each for each in events if isinstance(each, type))

    def deaf(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
        is_ignored = isinstance(event, classes) or event in events
        return (state, ()) if is_ignored else advance(state, event)

    return deaf


# The receiver.


def frees_quarantine_early(
    lease: receiving.ReceiverLease, event: receiving.AnyReceiverEvent
) -> receiving.ReceiverTransition:
    after, actions = receiving.advance(lease, event)
    if after.phase is receiving.ReceiverPhase.QUARANTINED is not lease.phase:
        return replace(after, phase=receiving.ReceiverPhase.CLOSED), (
            *actions,
            receiving.ReceiverAction.FREE_BLOCKS,
        )
    return after, actions


def frees_after_first_read(
    lease: receiving.ReceiverLease, event: receiving.AnyReceiverEvent
) -> receiving.ReceiverTransition:
    if lease.phase is receiving.ReceiverPhase.QUARANTINED and isinstance(
        event, receiving.ReadEnded
    ):
        lease = replace(lease, reading=frozenset({event.part}))
    return receiving.advance(lease, event)


def takes_repeated_mark_as_confirmation(
    lease: receiving.ReceiverLease, event: receiving.AnyReceiverEvent
) -> receiving.ReceiverTransition:
    if isinstance(event, receiving.Committed) and lease.has_asked:
        event = receiving.ReceiverEvent.CONFIRMED
    return receiving.advance(lease, event)


def consumes_without_mark(
    lease: receiving.ReceiverLease, event: receiving.AnyReceiverEvent
) -> receiving.ReceiverTransition:
    if isinstance(event, receiving.Bind) and lease.phase is receiving.ReceiverPhase.FETCHING:
        done = replace(lease, phase=receiving.ReceiverPhase.CONSUMED, outcome=Outcome.CONSUMED)
        return done, (receiving.ReceiverAction.CONSUME,)
    return receiving.advance(lease, event)


def accepts_gap(
    lease: receiving.ReceiverLease, event: receiving.AnyReceiverEvent
) -> receiving.ReceiverTransition:
    if isinstance(event, receiving.Committed):
        lease = replace(lease, announced=event.mark.parts)
    if isinstance(event, receiving.PartReady):
        lease = replace(lease, announced=event.part)
    return receiving.advance(lease, event)


def needs_no_confirmation(
    lease: receiving.ReceiverLease, event: receiving.AnyReceiverEvent
) -> receiving.ReceiverTransition:
    if isinstance(event, receiving.Attach):
        event = receiving.Attach(needs_confirmation=False)
    return receiving.advance(lease, event)


def ignores_bad_reads(
    lease: receiving.ReceiverLease, event: receiving.AnyReceiverEvent
) -> receiving.ReceiverTransition:
    if isinstance(event, receiving.ReadEnded):
        event = receiving.ReadEnded(event.part)
    return receiving.advance(lease, event)


def frees_consumed_blocks(
    lease: receiving.ReceiverLease, event: receiving.AnyReceiverEvent
) -> receiving.ReceiverTransition:
    after, actions = receiving.advance(lease, event)
    if receiving.ReceiverAction.CONSUME in actions:
        actions = (*actions, receiving.ReceiverAction.FREE_BLOCKS)
    return after, actions


# The sender.


def frees_before_received(
    lease: sending.SenderLease, event: sending.AnySenderEvent
) -> sending.SenderTransition:
    after, actions = sending.advance(lease, event)
    if isinstance(event, sending.Commit):
        return after, (*actions, sending.SenderAction.FREE_KV)
    return after, actions


def announces_early(
    lease: sending.SenderLease, event: sending.AnySenderEvent
) -> sending.SenderTransition:
    """Announces the second part with the first."""
    after, actions = sending.advance(lease, event)
    if event is sending.SenderEvent.PART_COMPUTED and lease.is_fetched:
        actions = (*actions, sending.AnnouncePart(1))
    return after, actions


# By state.


def confirms_with_submit(handoff: routing.Handoff, event: routing.Event) -> routing.Transition:
    after, actions = routing.advance(handoff, event)
    submits = routing.Action.SUBMIT in actions
    return after, (*actions, routing.Action.CONFIRM_SENDER) if submits else actions


def consumes_without_word(
    lease: sending.SenderLease, event: sending.AnySenderEvent
) -> sending.SenderTransition:
    if event is sending.SenderEvent.RELEASED:
        event = sending.SenderEvent.CONSUMED
    return sending.advance(lease, event)


MUTATIONS = [
    Mutation(
        "quarantined blocks wait for the end of reads",
        Machines(receiver=frees_quarantine_early),
        READ_WRITES,
    ),
    Mutation(
        "quarantined blocks wait for the end of all reads",
        Machines(receiver=frees_after_first_read),
        READ_WRITES,
        TWO_PARTS,
    ),
    Mutation(
        "a repeated commit mark is no confirmation",
        Machines(receiver=takes_repeated_mark_as_confirmation),
        COMPUTES,
        replace(LOSSES, kind="move"),
        True,
    ),
    Mutation(
        "nothing computes on uncommitted blocks",
        Machines(receiver=consumes_without_mark),
        COMPUTES,
    ),
    Mutation(
        "no part is missing",
        Machines(receiver=accepts_gap),
        COMPUTES,
        replace(LOSSES, local=False, timers=False),
        True,
    ),
    Mutation(
        "reads of another's memory are confirmed",
        Machines(receiver=needs_no_confirmation),
        COMPUTES,
    ),
    Mutation("a failed read fails the lease", Machines(receiver=ignores_bad_reads), COMPUTES),
    Mutation("blocks have one owner", Machines(receiver=frees_consumed_blocks), NO_BLOCK),
    Mutation(
        "an ended lease frees its blocks",
        Machines(receiver=without(receiving.advance, receiving.ReceiverAction.FREE_BLOCKS)),
        BLOCKS,
    ),
    Mutation(
        "a lost fetch fails the receiver's lease",
        Machines(receiver=ignoring(receiving.advance, receiving.ReceiverEvent.FETCH_LOST)),
        NO_END,
    ),
    Mutation(
        "a waiting sequence ends with its lease",
        Machines(receiver=without(receiving.advance, receiving.StopTarget)),
        NO_END,
    ),
    Mutation(
        "a failed lease is reported, or its sequence refused",
        Machines(
            receiver=without(
                receiving.advance, receiving.ReceiverAction.REFUSE_SEQUENCE, receiving.ReportFailure
            )
        ),
        NO_END,
    ),
    Mutation(
        "a released receiver's lease ends",
        Machines(receiver=ignoring(receiving.advance, receiving.ReceiverEvent.RELEASED)),
        NO_END,
    ),
    Mutation(
        "the receiver's lease expires",
        Machines(receiver_expires=lambda _: False),
        NO_END,
        replace(LOSSES, kind="move"),
        True,
    ),
    Mutation(
        "a lease id is granted once",
        Machines(grants_twice=True),
        BLOCKS,
        replace(LOSSES, blocks=2),
        True,
    ),
    Mutation(
        "committed blocks stay until they were read",
        Machines(sender=frees_before_received),
        BLOCKS,
    ),
    Mutation(
        "a part is announced when it is final",
        Machines(sender=announces_early),
        COMPUTES,
        replace(TWO_PARTS, faults=0),
    ),
    Mutation(
        "a sender's lease ends with its fetch, or by its router",
        Machines(
            sender=ignoring(sending.advance, sending.SenderEvent.FETCH_LOST),
            router=without(routing.advance, routing.Action.RELEASE_SENDER),
        ),
        NO_END,
    ),
    Mutation(
        "a released sender's lease ends",
        Machines(sender=ignoring(sending.advance, sending.SenderEvent.RELEASED)),
        NO_END,
        is_found_by_state=True,
    ),
    Mutation(
        "an ended lease aborts the fetch",
        Machines(sender=without(sending.advance, sending.SenderAction.ABORT_FETCH)),
        NO_END,
    ),
    Mutation(
        "the sender's lease expires",
        Machines(sender_expires=lambda _: False),
        NO_END,
        LOSSES,
        True,
        is_found_by_state=True,
    ),
    Mutation(
        "the router has deadlines",
        Machines(router_has_deadline=lambda _: False),
        NO_END,
        LOSSES,
        True,
        is_found_by_state=True,
    ),
    *(
        Mutation(
            f"the router does not forget {action.value}",
            Machines(router=without(routing.advance, action)),
            NO_END,
            is_found_by_state=action in (routing.Action.SUBMIT, routing.Action.RELEASE_SENDER),
        )
        for action in (
            routing.Action.START_SENDER,
            routing.Action.ATTACH,
            routing.Action.SUBMIT,
            routing.Action.RELEASE_RECEIVER,
            routing.Action.RELEASE_SENDER,
        )
    ),
    Mutation(
        "a failed handoff migrates",
        Machines(router=without(routing.advance, routing.Action.MIGRATE)),
        GOES_ON,
    ),
    Mutation(
        "a lost sender fails the handoff",
        Machines(router=ignoring(routing.advance, routing.Event.SENDER_FAILED)),
        NO_END,
        is_found_by_state=True,
    ),
    Mutation(
        "a lost receiver fails the handoff",
        Machines(router=ignoring(routing.advance, routing.Event.RECEIVER_FAILED)),
        NO_END,
        is_found_by_state=True,
    ),
    Mutation(
        "a finished sender ends the handoff",
        Machines(router=ignoring(routing.advance, routing.Event.SENDER_FINISHED)),
        GOES_ON,
    ),
    *(
        Mutation(
            f"by state, the router does not forget {action.value}",
            Machines(router=without(routing.advance, action)),
            NO_END,
            STATE,
        )
        for action in (
            routing.Action.SUBMIT,
            routing.Action.CONFIRM_SENDER,
            routing.Action.RELEASE_SENDER,
        )
    ),
    Mutation(
        "by state, a failed handoff migrates",
        Machines(router=without(routing.advance, routing.Action.MIGRATE)),
        GOES_ON,
        STATE,
    ),
    Mutation(
        "by state, a lost sender fails the handoff",
        Machines(router=ignoring(routing.advance, routing.Event.SENDER_FAILED)),
        NO_END,
        STATE,
    ),
    Mutation(
        "by state, a lost receiver fails the handoff",
        Machines(router=ignoring(routing.advance, routing.Event.RECEIVER_FAILED)),
        NO_END,
        STATE,
    ),
    Mutation(
        "by state, the router has deadlines",
        Machines(router_has_deadline=lambda _: False),
        NO_END,
        STATE_LOSSES,
        True,
    ),
    Mutation(
        "a state is confirmed after the receiver's first token",
        Machines(router=confirms_with_submit),
        UNUSED,
        STATE,
    ),
    Mutation(
        "a released state is not consumed",
        Machines(sender=consumes_without_word),
        UNUSED,
        STATE,
    ),
    Mutation("a state is used once", Machines(grants_twice=True), TWICE, STATE_LOSSES, True),
    Mutation(
        "the KV of a state stays until its lease ends",
        Machines(sender=frees_before_received),
        BLOCKS,
        STATE,
    ),
    Mutation(
        "an ended lease drops the KV of its state",
        Machines(sender=without(sending.advance, sending.SenderAction.FREE_KV)),
        BLOCKS,
        STATE,
    ),
    Mutation(
        "a released lease of a state ends",
        Machines(sender=ignoring(sending.advance, sending.SenderEvent.RELEASED)),
        NO_END,
        STATE,
    ),
    Mutation(
        "the lease of a state expires",
        Machines(sender_expires=lambda _: False),
        NO_END,
        STATE_LOSSES,
        True,
    ),
]
