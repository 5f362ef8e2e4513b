"""Machines that break one rule each, and the problem that the search must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from handoff.model import Bounds, Machines
from trtmesh.engine.handoff import receiver, sender
from trtmesh.engine.handoff.lease import Outcome
from trtmesh.router.fleet import handoff as router

NO_END = "no end is reachable"
READ_WRITES = "a read may write to a block of"
COMPUTES = "a sequence computes on parts"
NO_BLOCK = "has no block for"
BLOCKS = "blocks of"
GOES_ON = "goes on"


WIDE = Bounds(faults=2)
LOSSES = Bounds(faults=0, losses=1)


@dataclass(frozen=True)
class Mutation:
    """One broken rule."""

    rule: str
    machines: Machines
    finds: str
    bounds: Bounds = WIDE
    by_timers: bool = False
    """Whether an end may need a timer; most rules must hold without."""


def without(
    advance: Callable[..., tuple[object, tuple[object, ...]]], *dropped: object
) -> Callable[..., tuple[object, tuple[object, ...]]]:
    """A machine that forgets some actions, given as classes or values."""
    classes = tuple(each for each in dropped if isinstance(each, type))

    def forgetful(state: object, event: object) -> tuple[object, tuple[object, ...]]:
        after, actions = advance(state, event)
        kept = [each for each in actions if not (isinstance(each, classes) or each in dropped)]
        return after, tuple(kept)

    return forgetful


def ignoring(
    advance: Callable[..., tuple[object, tuple[object, ...]]], *events: type
) -> Callable[..., tuple[object, tuple[object, ...]]]:
    """A machine that ignores some events."""

    def deaf(state: object, event: object) -> tuple[object, tuple[object, ...]]:
        return (state, ()) if isinstance(event, events) else advance(state, event)

    return deaf


# The receiver.


def frees_quarantine_early(
    lease: receiver.ReceiverLease, event: receiver.Event
) -> receiver.Transition:
    after, actions = receiver.advance(lease, event)
    if after.phase is receiver.Phase.QUARANTINED is not lease.phase:
        return replace(after, phase=receiver.Phase.CLOSED), (*actions, receiver.FreeBlocks())
    return after, actions


def frees_after_first_read(
    lease: receiver.ReceiverLease, event: receiver.Event
) -> receiver.Transition:
    if lease.phase is receiver.Phase.QUARANTINED and isinstance(event, receiver.ReadEnded):
        lease = replace(lease, reading=frozenset({event.part}))
    return receiver.advance(lease, event)


def takes_repeated_mark_as_confirmation(
    lease: receiver.ReceiverLease, event: receiver.Event
) -> receiver.Transition:
    if isinstance(event, receiver.Committed) and lease.has_asked:
        event = receiver.Confirmed()
    return receiver.advance(lease, event)


def consumes_without_mark(
    lease: receiver.ReceiverLease, event: receiver.Event
) -> receiver.Transition:
    if isinstance(event, receiver.Bind) and lease.phase is receiver.Phase.FETCHING:
        done = replace(lease, phase=receiver.Phase.CONSUMED, outcome=Outcome.CONSUMED)
        return done, (receiver.Consume(),)
    return receiver.advance(lease, event)


def accepts_gap(lease: receiver.ReceiverLease, event: receiver.Event) -> receiver.Transition:
    if isinstance(event, receiver.Committed):
        lease = replace(lease, announced=event.mark.parts)
    if isinstance(event, receiver.PartReady):
        lease = replace(lease, announced=event.part)
    return receiver.advance(lease, event)


def needs_no_confirmation(
    lease: receiver.ReceiverLease, event: receiver.Event
) -> receiver.Transition:
    if isinstance(event, receiver.Attach):
        event = receiver.Attach(needs_confirmation=False)
    return receiver.advance(lease, event)


def ignores_bad_reads(lease: receiver.ReceiverLease, event: receiver.Event) -> receiver.Transition:
    if isinstance(event, receiver.ReadEnded):
        event = receiver.ReadEnded(event.part)
    return receiver.advance(lease, event)


def frees_consumed_blocks(
    lease: receiver.ReceiverLease, event: receiver.Event
) -> receiver.Transition:
    after, actions = receiver.advance(lease, event)
    if receiver.Consume() in actions:
        actions = (*actions, receiver.FreeBlocks())
    return after, actions


# The sender.


def frees_before_received(lease: sender.SenderLease, event: sender.Event) -> sender.Transition:
    after, actions = sender.advance(lease, event)
    if isinstance(event, sender.Commit):
        return after, (*actions, sender.FreeBlocks())
    return after, actions


def announces_early(lease: sender.SenderLease, event: sender.Event) -> sender.Transition:
    """Announces the second part with the first."""
    after, actions = sender.advance(lease, event)
    if isinstance(event, sender.PartComputed) and lease.fetch is sender.Fetch.OPEN:
        actions = (*actions, sender.AnnouncePart(1))
    return after, actions


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
    ),
    Mutation(
        "a repeated commit mark is no confirmation",
        Machines(receiver=takes_repeated_mark_as_confirmation),
        COMPUTES,
        LOSSES,
        True,
    ),
    Mutation(
        "nothing computes on uncommitted blocks",
        Machines(receiver=consumes_without_mark),
        COMPUTES,
    ),
    Mutation("no part is missing", Machines(receiver=accepts_gap), COMPUTES, LOSSES, True),
    Mutation(
        "reads of another's memory are confirmed",
        Machines(receiver=needs_no_confirmation),
        COMPUTES,
    ),
    Mutation("a failed read fails the lease", Machines(receiver=ignores_bad_reads), COMPUTES),
    Mutation("blocks have one owner", Machines(receiver=frees_consumed_blocks), NO_BLOCK),
    Mutation(
        "an ended lease frees its blocks",
        Machines(receiver=without(receiver.advance, receiver.FreeBlocks)),
        BLOCKS,
    ),
    Mutation(
        "a lost fetch fails the receiver's lease",
        Machines(receiver=ignoring(receiver.advance, receiver.FetchLost)),
        NO_END,
    ),
    Mutation(
        "a waiting sequence ends with its lease",
        Machines(receiver=without(receiver.advance, receiver.EndSequence)),
        NO_END,
    ),
    Mutation(
        "a failed lease is reported, or its sequence refused",
        Machines(
            receiver=without(receiver.advance, receiver.RefuseSequence, receiver.ReportFailure)
        ),
        NO_END,
    ),
    Mutation(
        "a released receiver's lease ends",
        Machines(receiver=ignoring(receiver.advance, receiver.Release)),
        NO_END,
    ),
    Mutation(
        "the receiver's lease expires",
        Machines(receiver_expires=lambda _: False),
        NO_END,
        LOSSES,
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
    Mutation("a part is announced when it is final", Machines(sender=announces_early), COMPUTES),
    Mutation(
        "a sender's lease ends with its fetch, or by its router",
        Machines(
            sender=ignoring(sender.advance, sender.FetchLost),
            router=without(router.advance, router.Action.RELEASE_SENDER),
        ),
        NO_END,
    ),
    Mutation(
        "a released sender's lease ends",
        Machines(sender=ignoring(sender.advance, sender.Release)),
        NO_END,
    ),
    Mutation(
        "an ended lease aborts the fetch",
        Machines(sender=without(sender.advance, sender.AbortFetch)),
        NO_END,
    ),
    Mutation(
        "the sender's lease expires", Machines(sender_expires=lambda _: False), NO_END, LOSSES, True
    ),
    Mutation(
        "the router has deadlines",
        Machines(router_has_deadline=lambda _: False),
        NO_END,
        LOSSES,
        True,
    ),
    *(
        Mutation(
            f"the router does not forget {action.value}",
            Machines(router=without(router.advance, action)),
            NO_END,
        )
        for action in (
            router.Action.START_SENDER,
            router.Action.ATTACH,
            router.Action.SUBMIT,
            router.Action.RELEASE_RECEIVER,
            router.Action.RELEASE_SENDER,
        )
    ),
    Mutation(
        "a failed handoff migrates",
        Machines(router=without(router.advance, router.Action.MIGRATE)),
        GOES_ON,
    ),
    Mutation(
        "a lost sender fails the handoff",
        Machines(router=ignoring(router.advance, router.SenderFailed)),
        NO_END,
    ),
    Mutation(
        "a lost receiver fails the handoff",
        Machines(router=ignoring(router.advance, router.ReceiverFailed)),
        NO_END,
    ),
    Mutation(
        "a finished sender ends the handoff",
        Machines(router=ignoring(router.advance, router.SenderFinished)),
        GOES_ON,
    ),
]
