"""The parties of one handoff, and the streams between them, around the state machines that the services run.

What the services do around the machines (tables of leases, streams, sequences) is modelled here; every decision is the
machines'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from trtmesh.engine.backend import Content
from trtmesh.engine.handoff import receive_machine as receiving
from trtmesh.engine.handoff import send_machine as sending
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem
from trtmesh.router.handoffs import machine as routing

CONTENT = Content(tokens=7, digest=b"tokens")

ANY = 1_000
"""No limit: crashes, breaks and cancels end a world long before."""

FAULT, LOSS, TIMER = "fault", "loss", "timer"

UNREAD, GOOD, BAD = range(3)
"""Content of a part in the receiver's blocks."""


class Violation(Exception):
    """A state that the protocol must exclude."""


class Message(NamedTuple):
    """A message, or the notice that its stream broke."""

    kind: str
    value: int = 0


LOST = Message("lost")


class Stream(NamedTuple):
    """Messages under way, first sent first delivered. `left` is the router's end, or the receiver's."""

    up: bool = False
    to_left: tuple[Message, ...] = ()
    to_right: tuple[Message, ...] = ()


class Lane(NamedTuple):
    """One handoff: the view of each party, and the streams between them."""

    item: str = "live"
    """live, ended (also by an ordinary migration, which starts from the tokens alone), or gone with the router."""
    handoff: routing.Handoff | None = None
    sender: sending.SenderLease | None = None
    source: str = ""
    """The sequence on the sender: "", waiting or running."""
    receiver: receiving.ReceiverLease | None = None
    target: str = ""
    """The sequence on the receiver: "", waiting, running or started."""
    state: str = ""
    """What the receiver did with the state: "", taken, or continued once it had a token."""
    parts: tuple[int, ...] = ()
    """Content of the receiver's blocks; empty without a lease."""
    to_sender: Stream = Stream(up=True)
    """Router to sender."""
    to_receiver: Stream = Stream(up=True)
    """Router to receiver."""
    fetch: Stream = Stream()
    """Receiver to sender."""

    @property
    def computed(self) -> int:
        """Parts with final content on the sender."""
        return self.sender.computed if self.sender is not None else 0


STREAMS = {"to_sender": "RP", "to_receiver": "RD", "fetch": "DP"}
"""The parties at the left and right ends: router, prefill worker, decode worker."""


class Effect(NamedTuple):
    """A change of blocks, or the start of a read."""

    worker: str
    kind: str
    value: int = 0


class Here(NamedTuple):
    """A lane, and the living parties."""

    lane: Lane
    up: str


class Step(NamedTuple):
    """A possible step of a lane."""

    label: str
    lane: int
    effects: tuple[Effect, ...] = ()
    kind: str = ""
    """A regular step, or one of FAULT, LOSS and TIMER."""


@dataclass(frozen=True)
class Machines:
    """The transition functions and timers; mutations replace some."""

    receiver: Callable[
        [receiving.ReceiverLease, receiving.AnyReceiverEvent], receiving.ReceiverTransition
    ] = receiving.advance
    sender: Callable[[sending.SenderLease, sending.AnySenderEvent], sending.SenderTransition] = (
        sending.advance
    )
    router: Callable[[routing.Handoff, routing.Event], routing.Transition] = routing.advance
    receiver_expires: Callable[[receiving.ReceiverLease], bool] = lambda lease: lease.expires
    sender_expires: Callable[[sending.SenderLease], bool] = lambda lease: lease.expires
    router_has_deadline: Callable[[routing.Handoff], bool] = lambda handoff: handoff.is_live
    grants_twice: bool = False
    """Whether a lease id that is in use is granted again."""


@dataclass(frozen=True)
class Bounds:
    """What may happen in a world."""

    kind: str = "prefill"
    """prefill, move (of a running sequence), park (of a paused client's), halves that a client brings together, or
    state (a prefill whose KV the backends move)."""
    one_sided: bool = True
    """Whether the receiver reads the sender's memory; otherwise the parts come in messages."""
    lanes: int = 1
    parts: int = 2
    """Parts of the KV."""
    faults: int = ANY
    """Most crashes, breaks, cancels, failed reads and faults of computation."""
    losses: int = 0
    """Most messages lost or repeated on a stream that stays up."""
    timers: bool = True
    """Whether timers may fire at any time; otherwise only as faults."""
    blocks: int = 1
    """Blocks of each pool."""
    local: bool = True
    """Whether local sequences compete for the blocks."""

    @property
    def moves(self) -> bool:
        """Whether the sequence runs before the handoff."""
        return self.kind in ("move", "park")

    @property
    def by_state(self) -> bool:
        """Whether the backends move the KV."""
        return self.kind == "state"


FIELDS = attrgetter(*Lane._fields)


class LaneRun:
    """One step of a lane, on a copy of its fields."""

    def __init__(self, machines: Machines, bounds: Bounds, lane: Lane, up: str) -> None:
        self._machines = machines
        self._bounds = bounds
        self._up = up
        self.__dict__.update(zip(Lane._fields, lane, strict=True))
        self.effects: list[Effect] = []

    item: str
    handoff: routing.Handoff | None
    sender: sending.SenderLease | None
    source: str
    receiver: receiving.ReceiverLease | None
    target: str
    state: str
    parts: tuple[int, ...]
    to_sender: Stream
    to_receiver: Stream
    fetch: Stream

    def lane(self) -> Lane:
        """The lane after the step, without what has no effect any more."""
        if self.item != "live":
            # The router ignores everything about an item that has ended.
            self.to_sender = queued(self.to_sender, "to_left", ())
            self.to_receiver = queued(self.to_receiver, "to_left", ())
            self.handoff = None
        if self.receiver is None:
            self.parts = ()
        return Lane(*FIELDS(self))

    # Streams.

    def send(self, stream: str, side: str, kind: str, value: int = 0) -> None:
        """Sends to one end; what a broken stream carries is lost."""
        now: Stream = getattr(self, stream)
        if now.up:
            messages = (*getattr(now, side), Message(kind, value))
            setattr(self, stream, queued(now, side, messages))

    def break_stream(
        self, stream: str, *, left: bool = True, right: bool = True, late: bool = False
    ) -> None:
        """Breaks a stream: each living end sees it break, some time, if `late` after what was sent before."""
        now: Stream = getattr(self, stream)
        ends = [now.to_left if left else None, now.to_right if right else None]
        setattr(self, stream, Stream(False, *(cut(each, now.up, late) for each in ends)))

    def deliver(self, stream: str, side: str, at: str, *, repeat: bool = False) -> None:
        """Delivers the first message at one end."""
        now: Stream = getattr(self, stream)
        first, *rest = getattr(now, side)
        if not repeat:
            setattr(self, stream, queued(now, side, tuple(rest)))
        getattr(self, f"at_{at}")(stream, first)

    def drop(self, stream: str, side: str) -> None:
        """Loses the first message."""
        now: Stream = getattr(self, stream)
        setattr(self, stream, queued(now, side, getattr(now, side)[1:]))

    # The router.

    def begin(self) -> None:
        if self._bounds.by_state:
            start = routing.begin_by_state
        else:
            start = routing.park if self._bounds.kind in ("park", "halves") else routing.begin
        self.handoff, actions = start()
        self.route(actions)

    def give(self) -> None:
        """Ends the first half; the client has the descriptor and never returns."""
        self.advance_router(routing.Event.GIVEN)
        self.item = "ended"

    def adopt(self) -> None:
        """Ends the first half, and starts the second."""
        self.advance_router(routing.Event.GIVEN)
        self.handoff, actions = routing.adopt()
        self.route(actions)

    def at_router(self, stream: str, message: Message) -> None:
        if self.handoff is None:
            return
        if self.handoff.result is routing.Result.MOVED:
            self.at_item(stream, message)
            return
        event = router_event(stream, message)
        if event is not None:
            self.advance_router(event)
        if event == routing.Event.SENDER_FINISHED and self.item == "live":
            raise Violation("a finished stream goes on")

    def at_item(self, stream: str, message: Message) -> None:
        """A message for an item whose handoff is done."""
        if stream == "to_receiver" and message.kind in ("finished", "error", "lost"):
            self.item = "ended"

    def advance_router(self, event: routing.Event) -> None:
        assert self.handoff is not None
        self.handoff, actions = self._machines.router(self.handoff, event)
        self.route(actions)
        if self.handoff.result in (routing.Result.FINISHED, routing.Result.CANCELLED):
            self.item = "ended"

    def route(self, actions: tuple[routing.Action, ...]) -> None:
        for action in actions:
            match action:
                case routing.Action.RESERVE:
                    self.send("to_receiver", "to_right", "reserve")
                case routing.Action.START_SENDER:
                    self.send("to_sender", "to_right", "start")
                case routing.Action.ATTACH:
                    self.send("to_receiver", "to_right", "attach")
                case routing.Action.SUBMIT:
                    self.send("to_receiver", "to_right", "submit")
                case routing.Action.CONFIRM_SENDER:
                    self.send("to_sender", "to_right", "confirm")
                case routing.Action.RELEASE_SENDER:
                    self.send("to_sender", "to_right", "release")
                case routing.Action.RELEASE_RECEIVER:
                    self.send("to_receiver", "to_right", "release")
                case routing.Action.MIGRATE:
                    self.migrate()

    def migrate(self) -> None:
        """Stops what runs on without a handoff; the item continues elsewhere."""
        assert self.handoff is not None
        self.item = "ended"
        if self._bounds.moves:
            self.send("to_sender", "to_right", "release")
        has_submitted = self.handoff.by_state and (
            self.handoff.receiver is routing.Receiver.SUBMITTED
        )
        if has_submitted or self.handoff.result is routing.Result.MOVED:
            self.send("to_receiver", "to_right", "release")

    def cancel(self) -> None:
        assert self.handoff is not None
        if self.handoff.is_live:
            self.advance_router(routing.Event.CANCELLED)
        self.migrate()

    # The prefill worker.

    def at_sender(self, stream: str, message: Message) -> None:
        match message.kind:
            case "start":
                self.start_source()
            case "release":
                self.stop_source()
            case "confirm":
                self.advance_sender(sending.SenderEvent.CONSUMED)
            case "lost" if stream == "to_sender":
                if not self.belongs_to_client:
                    self.stop_source()
            case "fetch":
                self.advance_sender(sending.SenderEvent.FETCH_OPENED)
            case "received":
                self.advance_sender(sending.SenderEvent.RECEIVED)
            case "lost" if self.sender is not None:
                self.advance_sender(sending.SenderEvent.FETCH_LOST)

    @property
    def belongs_to_client(self) -> bool:
        """Whether the sender's lease outlives the stream of its router."""
        is_committed = (
            self.sender is not None and self.sender.phase is sending.SenderPhase.COMMITTED
        )
        return self._bounds.kind == "halves" and is_committed

    def start_source(self) -> None:
        moves = self._bounds.moves
        if self.sender is not None or (self.source == "") is moves:
            # A handle in use, or a sequence that has ended.
            self.send("to_sender", "to_left", "error")
            return
        self.source = self.source or "waiting"
        self.sender = sending.SenderLease(computed=self._bounds.parts if moves else 0)
        if not self._bounds.by_state:
            self.send("to_sender", "to_left", "offered")

    def stop_source(self) -> None:
        if self.sender is not None:
            self.advance_sender(sending.SenderEvent.RELEASED)
        elif self.source:
            self.end_source()

    def end_source(self) -> None:
        if self.source == "running":
            self.effects.append(Effect("P", "free sequence"))
        self.source = ""

    def compute(self) -> None:
        self.advance_sender(sending.SenderEvent.PART_COMPUTED)

    def expire_sender(self) -> None:
        self.advance_sender(sending.SenderEvent.EXPIRED)

    def hand_over(self) -> None:
        """Ends the sequence with its handoff; by state, the backend keeps the KV."""
        mark = None if self._bounds.by_state else CommitMark(self._bounds.parts, CONTENT)
        self.advance_sender(sending.Commit(mark))
        self.source = ""
        self.send("to_sender", "to_left", "committed")

    def finish_source(self, kind: str) -> None:
        self.advance_sender(sending.SenderEvent.SEQUENCE_ENDED)
        self.end_source()
        self.send("to_sender", "to_left", kind)

    def advance_sender(self, event: sending.AnySenderEvent) -> None:
        if self.sender is None:
            if event is sending.SenderEvent.FETCH_OPENED:
                self.break_stream("fetch", right=False)
            return
        self.sender, actions = self._machines.sender(self.sender, event)
        for action in actions:
            self.act_as_sender(action)
        if self.sender.phase is sending.SenderPhase.CLOSED:
            self.check_outcome(self.sender.outcome)
            self.sender = None

    def act_as_sender(self, action: sending.AnySenderAction) -> None:
        match action:
            case sending.AnnouncePart(part):
                self.send("fetch", "to_left", "part", part)
            case sending.SendMark(mark):
                self.send("fetch", "to_left", "mark", mark.parts)
            case sending.SenderAction.SEND_CONFIRMED:
                self.send("fetch", "to_left", "confirmed")
            case sending.SenderAction.ABORT_FETCH | sending.SenderAction.REFUSE_FETCH:
                self.break_stream("fetch", right=False, late=True)
            case sending.StopSource():
                self.end_source()
                self.send("to_sender", "to_left", "error")
            case sending.SenderAction.TAKE_KV:
                self.effects.append(Effect("P", "sequence to lease"))
            case sending.SenderAction.FREE_KV:
                self.effects.append(Effect("P", "free lease"))

    def check_outcome(self, outcome: Outcome | None) -> None:
        if outcome is None:
            raise Violation("the sender's lease ended without an outcome")
        is_by_state = self._bounds.by_state
        if is_by_state and outcome is Outcome.CONSUMED and self.state != "continued":
            raise Violation("a state is consumed from which nothing continued")

    # The decode worker.

    def at_receiver(self, stream: str, message: Message) -> None:
        match message.kind:
            case "reserve" if self.receiver is None or self._machines.grants_twice:
                self.effects.append(Effect("D", "reserve"))
            case "submit":
                self.submit_target()
            case "release":
                self.stop_target()
            case "lost" if stream == "to_receiver":
                self.stop_target()
            case _:
                event = receiver_event(message, self._bounds)
                if event is not None and self.receiver is not None:
                    self.advance_receiver(event)

    def reserved(self, *, full: bool) -> None:
        """Answers a reservation, granted or refused."""
        if full:
            self.send("to_receiver", "to_left", "refused")
        else:
            self.receiver = receiving.ReceiverLease()
            self.parts = (UNREAD,) * self._bounds.parts
            self.send("to_receiver", "to_left", "reserved")

    def submit_target(self) -> None:
        if self._bounds.by_state:
            self.take_state()
            return
        if self.receiver is None:
            self.send("to_receiver", "to_left", "error")
            return
        if self.receiver.wanted is None and self.receiver.phase in receiving.HELD:
            self.target = "waiting"
        self.advance_receiver(receiving.Bind(CONTENT))

    def stop_target(self) -> None:
        if self.receiver is not None:
            self.advance_receiver(receiving.ReceiverEvent.RELEASED)
        if self.target in ("running", "started"):
            self.end_target("error")
        elif self.target and self._bounds.by_state:
            self.lose_target()

    def end_target(self, kind: str) -> None:
        self.effects.append(Effect("D", "free sequence"))
        self.target = ""
        self.send("to_receiver", "to_left", kind)

    def take_state(self) -> None:
        """Lets a sequence wait for the library, with a state that is used once."""
        if self.state and not self._machines.grants_twice:
            self.send("to_receiver", "to_left", "error")
            return
        if self.state:
            raise Violation("a state is used twice")
        self.state, self.target = "taken", "waiting"

    def fetch_state(self) -> None:
        """The library has moved the KV, and the sequence runs."""
        self.effects.append(Effect("D", "allocate"))
        self.target = "running"

    def lose_target(self) -> None:
        """Fails a sequence that has no blocks yet."""
        self.target = ""
        self.send("to_receiver", "to_left", "error")

    def start_target(self) -> None:
        """The sequence has its first token here."""
        self.target = "started"
        self.state = self.state and "continued"
        self.send("to_receiver", "to_left", "token")

    def read_ended(self, part: int, *, content: int, problem: Problem | None) -> None:
        self.parts = tuple(
            content if number == part else each for number, each in enumerate(self.parts)
        )
        if self.receiver is not None:
            self.advance_receiver(receiving.ReadEnded(part, problem))

    def advance_receiver(self, event: receiving.AnyReceiverEvent) -> None:
        assert self.receiver is not None
        self.receiver, actions = self._machines.receiver(self.receiver, event)
        for action in actions:
            self.act_as_receiver(action)
        if self.receiver.phase in (
            receiving.ReceiverPhase.CLOSED,
            receiving.ReceiverPhase.CONSUMED,
        ):
            if self.receiver.outcome is None:
                raise Violation("the receiver's lease ended without an outcome")
            self.receiver = None

    def act_as_receiver(self, action: receiving.AnyReceiverAction) -> None:
        match action:
            case receiving.ReceiverAction.OPEN_FETCH:
                open_fetch = Stream(True, (), (Message("fetch"),))
                self.fetch = open_fetch if "P" in self._up else Stream(False, (LOST,))
            case receiving.ReadPart(part):
                self.effects.append(Effect("D", "read", part))
            case receiving.ReceiverAction.SEND_RECEIVED:
                self.send("fetch", "to_right", "received")
            case receiving.ReceiverAction.CLOSE_FETCH:
                self.close_fetch()
            case receiving.ReceiverAction.CONSUME:
                if self.parts != (GOOD,) * self._bounds.parts:
                    raise Violation(f"a sequence computes on parts {self.parts}")
                self.target = "running"
                self.effects.append(Effect("D", "lease to sequence"))
            case receiving.ReceiverAction.FREE_BLOCKS:
                self.effects.append(Effect("D", "free lease"))
            case receiving.StopTarget():
                self.target = ""
                self.send("to_receiver", "to_left", "error")
            case receiving.ReportFailure():
                self.send("to_receiver", "to_left", "failed")
            case receiving.ReceiverAction.REFUSE_SEQUENCE:
                self.send("to_receiver", "to_left", "error")

    def close_fetch(self) -> None:
        self.break_stream("fetch", left=False, late=True)

    # Crashes.

    def crash(self, party: str) -> None:
        """Ends all of a party's state; the others see its streams break."""
        for stream, ends in STREAMS.items():
            if party in ends:
                self.break_stream(stream, left=ends[0] != party, right=ends[1] != party)
        match party:
            case "R":
                self.handoff, self.item = None, "gone"
            case "P":
                self.sender, self.source = None, ""
            case "D":
                self.receiver, self.target = None, ""


def queued(stream: Stream, side: str, messages: tuple[Message, ...]) -> Stream:
    """The stream with other messages under way to one end."""
    if side == "to_left":
        return Stream(stream.up, messages, stream.to_right)
    return Stream(stream.up, stream.to_left, messages)


def cut(messages: tuple[Message, ...] | None, up: bool, late: bool) -> tuple[Message, ...]:
    """What an end still gets after a break; None is a dead end."""
    if messages is None or not up:
        return messages or ()
    return (*messages, LOST) if late else (LOST,)


ROUTER_EVENTS: dict[tuple[str, str], routing.Event] = {
    ("to_sender", "offered"): routing.Event.OFFERED,
    ("to_sender", "committed"): routing.Event.SENDER_COMMITTED,
    ("to_sender", "finished"): routing.Event.SENDER_FINISHED,
    ("to_sender", "error"): routing.Event.SENDER_FAILED,
    ("to_sender", "lost"): routing.Event.SENDER_FAILED,
    ("to_receiver", "reserved"): routing.Event.RESERVED,
    ("to_receiver", "refused"): routing.Event.RECEIVER_FAILED,
    ("to_receiver", "failed"): routing.Event.RECEIVER_FAILED,
    ("to_receiver", "error"): routing.Event.RECEIVER_FAILED,
    ("to_receiver", "lost"): routing.Event.RECEIVER_FAILED,
    ("to_receiver", "token"): routing.Event.RECEIVER_STARTED,
    ("to_receiver", "finished"): routing.Event.RECEIVER_STARTED,
}


def router_event(stream: str, message: Message) -> routing.Event | None:
    return ROUTER_EVENTS.get((stream, message.kind))


def receiver_event(message: Message, bounds: Bounds) -> receiving.AnyReceiverEvent | None:
    match message:
        case Message("attach"):
            return receiving.Attach(needs_confirmation=bounds.one_sided)
        case Message("part", part):
            return receiving.PartReady(part)
        case Message("mark", parts):
            return receiving.Committed(CommitMark(parts, CONTENT))
        case Message("confirmed"):
            return receiving.ReceiverEvent.CONFIRMED
        case Message("lost"):
            return receiving.ReceiverEvent.FETCH_LOST
    return None
