"""A handoff as seen by the router: the reports of both workers, and the next actions.

The receiver reserves blocks, then the sender starts; the sender stops at the handoff, then the receiver continues. A
paused item stops first and gets a receiver when the client reads again. After every failure both workers are released
and the item migrates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Sender(Enum):
    """Progress of the worker with the KV."""

    IDLE = "idle"
    RUNNING = "running"
    COMMITTED = "committed"
    """The sequence stopped there with FINISH_REASON_HANDOFF."""


class Receiver(Enum):
    """Progress of the worker that will continue."""

    NONE = "none"
    RESERVING = "reserving"
    RESERVED = "reserved"
    ATTACHED = "attached"
    SUBMITTED = "submitted"


class Result(Enum):
    """How a handoff ended."""

    MOVED = "moved"
    """The receiver generates."""
    FINISHED = "finished"
    """The sender finished the sequence."""
    MIGRATED = "migrated"
    """It failed, and the item migrates."""
    CANCELLED = "cancelled"
    GIVEN = "given"
    """A client has the descriptor, and the sender's lease with it."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """A handoff under way, or its result."""

    sender: Sender = Sender.IDLE
    receiver: Receiver = Receiver.NONE
    is_offered: bool = False
    """Whether the sender's descriptor is known."""
    result: Result | None = None
    by_state: bool = False
    """Whether the backends move the KV themselves: the receiver has no lease, and gets the sender's state with its
    sequence."""

    @property
    def is_live(self) -> bool:
        """Whether the leases are renewed, and a deadline runs."""
        return self.result is None

    @property
    def is_parked(self) -> bool:
        """Whether the KV waits for the client of a paused item."""
        return self.is_live and self.receiver is Receiver.NONE


class Event(Enum):
    RESERVED = "reserved"
    """The receiver reserved the blocks."""
    OFFERED = "offered"
    """The sender has a lease; its descriptor is known."""
    SENDER_COMMITTED = "sender_committed"
    """The sequence ended with FINISH_REASON_HANDOFF."""
    SENDER_FINISHED = "sender_finished"
    """The sequence ended for good before the handoff."""
    SENDER_FAILED = "sender_failed"
    """The sequence failed, or the sender is lost."""
    RECEIVER_FAILED = "receiver_failed"
    """The reservation was refused, the lease or the sequence failed, or the receiver is lost."""
    RECEIVER_STARTED = "receiver_started"
    """The first token or the regular end came from the receiver."""
    RESUMED = "resumed"
    """A receiver was chosen for a parked item."""
    GIVEN = "given"
    """The client of a context_only item received the descriptor of the parked KV."""
    CANCELLED = "cancelled"
    """The item was stopped, or lost its client."""
    LATE = "late"
    """The deadline of the present stage passed."""


class Action(Enum):
    RESERVE = "reserve"
    """Asks the receiver for blocks."""
    START_SENDER = "start_sender"
    """Submits the prefill, or asks for the handoff of a running sequence."""
    ATTACH = "attach"
    """Sends the descriptor to the receiver."""
    SUBMIT = "submit"
    """Submits the rest of the sequence to the receiver, with the lease."""
    CONFIRM_SENDER = "confirm_sender"
    """Releases the lease, because the receiver used the state."""
    RELEASE_SENDER = "release_sender"
    """Releases the lease and stops the sequence."""
    RELEASE_RECEIVER = "release_receiver"
    """Releases the lease and stops the sequence."""
    MIGRATE = "migrate"
    """Places the item again."""


Transition = tuple[Handoff, tuple[Action, ...]]


def begin() -> Transition:
    """Starts a handoff to a chosen receiver."""
    return Handoff(receiver=Receiver.RESERVING), (Action.RESERVE,)


def begin_by_state() -> Transition:
    """Starts a handoff to a chosen receiver, by a state of the sender's backend."""
    handoff = Handoff(Sender.RUNNING, Receiver.RESERVED, by_state=True)
    return handoff, (Action.START_SENDER,)


def park() -> Transition:
    """Starts the handoff of a paused item, without a receiver."""
    return Handoff(sender=Sender.RUNNING), (Action.START_SENDER,)


def adopt() -> Transition:
    """Starts the second half of a handoff whose descriptor came from a client."""
    handoff = Handoff(Sender.COMMITTED, Receiver.RESERVING, is_offered=True)
    return handoff, (Action.RESERVE,)


def advance(handoff: Handoff, event: Event) -> Transition:
    """The handoff after an event, and what to do, in order."""
    if handoff.result is not None:
        return handoff, ()
    match event, handoff.receiver:
        case Event.CANCELLED, _:
            return _end(handoff, Result.CANCELLED)
        case ((Event.LATE | Event.RECEIVER_FAILED), _):
            return _end(handoff, Result.MIGRATED)
        case Event.SENDER_FAILED, _:
            return _on_sender_failed(handoff)
        case Event.SENDER_FINISHED, _:
            return _end(replace(handoff, sender=Sender.IDLE), Result.FINISHED)
        case Event.OFFERED, _:
            return _progress(replace(handoff, is_offered=True))
        case Event.SENDER_COMMITTED, _:
            # The end carries the descriptor, too.
            return _progress(replace(handoff, sender=Sender.COMMITTED, is_offered=True))
        case Event.GIVEN, Receiver.NONE if handoff.sender is Sender.COMMITTED:
            return replace(handoff, result=Result.GIVEN), ()
        case Event.RESUMED, Receiver.NONE:
            return replace(handoff, receiver=Receiver.RESERVING), (Action.RESERVE,)
        case Event.RESERVED, Receiver.RESERVING:
            return _progress(replace(handoff, receiver=Receiver.RESERVED))
        case Event.RECEIVER_STARTED, Receiver.SUBMITTED:
            # Released again in case the receiver's word to the sender was lost.
            word = Action.CONFIRM_SENDER if handoff.by_state else Action.RELEASE_SENDER
            return replace(handoff, result=Result.MOVED), (word,)
    return handoff, ()


def _on_sender_failed(handoff: Handoff) -> Transition:
    """Ends the handoff, unless the receiver has the descriptor. The receiver may have the KV, and otherwise fails
    alone."""
    attached = handoff.receiver in (Receiver.ATTACHED, Receiver.SUBMITTED)
    if handoff.sender is Sender.COMMITTED and attached:
        return handoff, ()
    return _end(replace(handoff, sender=Sender.IDLE), Result.MIGRATED)


def _progress(handoff: Handoff) -> Transition:
    """Does whatever the two workers have made possible."""
    actions: list[Action] = []
    if handoff.receiver is Receiver.RESERVED and handoff.sender is Sender.IDLE:
        handoff = replace(handoff, sender=Sender.RUNNING)
        actions.append(Action.START_SENDER)
    if handoff.receiver is Receiver.RESERVED and handoff.is_offered:
        handoff = replace(handoff, receiver=Receiver.ATTACHED)
        if not handoff.by_state:
            actions.append(Action.ATTACH)
    if handoff.receiver is Receiver.ATTACHED and handoff.sender is Sender.COMMITTED:
        handoff = replace(handoff, receiver=Receiver.SUBMITTED)
        actions.append(Action.SUBMIT)
    return handoff, tuple(actions)


def _end(handoff: Handoff, result: Result) -> Transition:
    """Releases both workers; after a failure the item migrates."""
    actions: list[Action] = []
    if handoff.sender is not Sender.IDLE:
        actions.append(Action.RELEASE_SENDER)
    if handoff.receiver is not Receiver.NONE and not handoff.by_state:
        actions.append(Action.RELEASE_RECEIVER)
    if result is Result.MIGRATED:
        actions.append(Action.MIGRATE)
    return replace(handoff, result=result), tuple(actions)
