"""A world of one router, two workers and their streams, around the state machines that the services run.

A world has lanes, one for each handoff, with the streams of that handoff. What the services do around the machines
(tables of leases, streams, pools, sequences) is modelled here; every decision is the machines'. A block has one owner:
"", "local" (another sequence of the worker), "lease N" or "sequence N" of lane N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

from trtmesh.engine.handoff import receiver as receiving
from trtmesh.engine.handoff import sender as sending
from trtmesh.engine.handoff.lease import CommitMark, Content, Problem
from trtmesh.router.fleet import handoff as routing

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
        return self.sender.computed if self.sender else 0


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

    receiver: Callable[[receiving.ReceiverLease, receiving.Event], receiving.Transition] = (
        receiving.advance
    )
    sender: Callable[[sending.SenderLease, sending.Event], sending.Transition] = sending.advance
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
    """prefill, move (of a running sequence) or park (of a paused client's)."""
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


class LaneRun:
    """One step of a lane, on a copy of its fields."""

    def __init__(self, machines: Machines, bounds: Bounds, lane: Lane, up: str) -> None:
        self._machines = machines
        self._bounds = bounds
        self._up = up
        self.__dict__.update(lane._asdict())
        self.effects: list[Effect] = []

    item: str
    handoff: routing.Handoff | None
    sender: sending.SenderLease | None
    source: str
    receiver: receiving.ReceiverLease | None
    target: str
    parts: tuple[int, ...]
    to_sender: Stream
    to_receiver: Stream
    fetch: Stream

    def lane(self) -> Lane:
        """The lane after the step, without what has no effect any more."""
        if self.item != "live":
            # The router ignores everything about an item that has ended.
            self.to_sender = self.to_sender._replace(to_left=())
            self.to_receiver = self.to_receiver._replace(to_left=())
            self.handoff = None
        if self.receiver is None:
            self.parts = ()
        return Lane(*(getattr(self, name) for name in Lane._fields))

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
        handoff, actions = routing.park() if self._bounds.kind == "park" else routing.begin()
        self.handoff = handoff
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
        if event == routing.SenderFinished() and self.item == "live":
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
        if self._bounds.kind != "prefill":
            self.send("to_sender", "to_right", "release")
        if self.handoff.result is routing.Result.MOVED:
            self.send("to_receiver", "to_right", "release")

    def cancel(self) -> None:
        assert self.handoff is not None
        if self.handoff.is_live:
            self.advance_router(routing.Cancelled())
        self.migrate()

    # The prefill worker.

    def at_sender(self, stream: str, message: Message) -> None:
        match message.kind:
            case "start":
                self.start_source()
            case "release":
                self.stop_source()
            case "lost" if stream == "to_sender":
                self.stop_source()
            case "fetch":
                self.advance_sender(sending.FetchOpened())
            case "received":
                self.advance_sender(sending.Received())
            case "lost" if self.sender is not None:
                self.advance_sender(sending.FetchLost())

    def start_source(self) -> None:
        moves = self._bounds.kind != "prefill"
        if self.sender is not None or (self.source == "") is moves:
            # A handle in use, or a sequence that has ended.
            self.send("to_sender", "to_left", "error")
            return
        self.source = self.source or "waiting"
        self.sender = sending.SenderLease(computed=self._bounds.parts if moves else 0)
        self.send("to_sender", "to_left", "offered")

    def stop_source(self) -> None:
        if self.sender is not None:
            self.advance_sender(sending.Release())
        elif self.source:
            self.end_source()

    def end_source(self) -> None:
        if self.source == "running":
            self.effects.append(Effect("P", "free sequence"))
        self.source = ""

    def compute(self) -> None:
        self.advance_sender(sending.PartComputed())

    def hand_over(self) -> None:
        self.advance_sender(sending.Commit(CommitMark(self._bounds.parts, CONTENT)))
        self.source = ""
        self.send("to_sender", "to_left", "committed")

    def finish_source(self, kind: str) -> None:
        self.advance_sender(sending.SequenceEnded())
        self.end_source()
        self.send("to_sender", "to_left", kind)

    def advance_sender(self, event: sending.Event) -> None:
        if self.sender is None:
            if isinstance(event, sending.FetchOpened):
                self.break_stream("fetch", right=False)
            return
        self.sender, actions = self._machines.sender(self.sender, event)
        for action in actions:
            self.act_as_sender(action)
        if self.sender.phase is sending.Phase.CLOSED:
            if self.sender.outcome is None:
                raise Violation("the sender's lease ended without an outcome")
            self.sender = None

    def act_as_sender(self, action: sending.Action) -> None:
        match action:
            case sending.AnnouncePart(part):
                self.send("fetch", "to_left", "part", part)
            case sending.SendMark(mark):
                self.send("fetch", "to_left", "mark", mark.parts)
            case sending.SendConfirmed():
                self.send("fetch", "to_left", "confirmed")
            case sending.AbortFetch() | sending.RefuseFetch():
                self.break_stream("fetch", right=False, late=True)
            case sending.EndSequence():
                self.end_source()
                self.send("to_sender", "to_left", "error")
            case sending.TakeBlocks():
                self.effects.append(Effect("P", "sequence to lease"))
            case sending.FreeBlocks():
                self.effects.append(Effect("P", "free lease"))

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
        if self.receiver is None:
            self.send("to_receiver", "to_left", "error")
            return
        if self.receiver.wanted is None and self.receiver.phase in receiving.HELD:
            self.target = "waiting"
        self.advance_receiver(receiving.Bind(CONTENT))

    def stop_target(self) -> None:
        if self.receiver is not None:
            self.advance_receiver(receiving.Release())
        if self.target in ("running", "started"):
            self.end_target("error")

    def end_target(self, kind: str) -> None:
        self.effects.append(Effect("D", "free sequence"))
        self.target = ""
        self.send("to_receiver", "to_left", kind)

    def read_ended(self, part: int, *, content: int, problem: Problem | None) -> None:
        self.parts = tuple(
            content if number == part else each for number, each in enumerate(self.parts)
        )
        if self.receiver is not None:
            self.advance_receiver(receiving.ReadEnded(part, problem))

    def advance_receiver(self, event: receiving.Event) -> None:
        assert self.receiver is not None
        self.receiver, actions = self._machines.receiver(self.receiver, event)
        for action in actions:
            self.act_as_receiver(action)
        if self.receiver.phase in (receiving.Phase.CLOSED, receiving.Phase.CONSUMED):
            if self.receiver.outcome is None:
                raise Violation("the receiver's lease ended without an outcome")
            self.receiver = None

    def act_as_receiver(self, action: receiving.Action) -> None:
        match action:
            case receiving.OpenFetch():
                open_fetch = Stream(True, (), (Message("fetch"),))
                self.fetch = open_fetch if "P" in self._up else Stream(False, (LOST,))
            case receiving.ReadPart(part):
                self.effects.append(Effect("D", "read", part))
            case receiving.SendReceived():
                self.send("fetch", "to_right", "received")
            case receiving.CloseFetch():
                self.close_fetch()
            case receiving.Consume():
                if self.parts != (GOOD,) * self._bounds.parts:
                    raise Violation(f"a sequence computes on parts {self.parts}")
                self.target = "running"
                self.effects.append(Effect("D", "lease to sequence"))
            case receiving.FreeBlocks():
                self.effects.append(Effect("D", "free lease"))
            case receiving.EndSequence():
                self.target = ""
                self.send("to_receiver", "to_left", "error")
            case receiving.ReportFailure():
                self.send("to_receiver", "to_left", "failed")
            case receiving.RefuseSequence():
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
        return stream._replace(to_left=messages)
    return stream._replace(to_right=messages)


def cut(messages: tuple[Message, ...] | None, up: bool, late: bool) -> tuple[Message, ...]:
    """What an end still gets after a break; None is a dead end."""
    if messages is None or not up:
        return messages or ()
    return (*messages, LOST) if late else (LOST,)


ROUTER_EVENTS: dict[tuple[str, str], routing.Event] = {
    ("to_sender", "offered"): routing.Offered(),
    ("to_sender", "committed"): routing.SenderCommitted(),
    ("to_sender", "finished"): routing.SenderFinished(),
    ("to_sender", "error"): routing.SenderFailed(),
    ("to_sender", "lost"): routing.SenderFailed(),
    ("to_receiver", "reserved"): routing.Reserved(),
    ("to_receiver", "refused"): routing.ReceiverFailed(),
    ("to_receiver", "failed"): routing.ReceiverFailed(),
    ("to_receiver", "error"): routing.ReceiverFailed(),
    ("to_receiver", "lost"): routing.ReceiverFailed(),
    ("to_receiver", "token"): routing.ReceiverStarted(),
    ("to_receiver", "finished"): routing.ReceiverStarted(),
}


def router_event(stream: str, message: Message) -> routing.Event | None:
    return ROUTER_EVENTS.get((stream, message.kind))


def receiver_event(message: Message, bounds: Bounds) -> receiving.Event | None:
    match message:
        case Message("attach"):
            return receiving.Attach(needs_confirmation=bounds.one_sided)
        case Message("part", part):
            return receiving.PartReady(part)
        case Message("mark", parts):
            return receiving.Committed(CommitMark(parts, CONTENT))
        case Message("confirmed"):
            return receiving.Confirmed()
        case Message("lost"):
            return receiving.FetchLost()
    return None


class Read(NamedTuple):
    """A read under way; it ends some time, and until then may write."""

    lane: int
    part: int
    block: int


class World(NamedTuple):
    """A state of everything; lanes by number in the table of the explorer."""

    lanes: tuple[int, ...]
    up: str = "RPD"
    """Living parties."""
    sender_pool: tuple[str, ...] = ()
    receiver_pool: tuple[str, ...] = ()
    reads: frozenset[Read] = frozenset()
    faults: int = 0
    losses: int = 0


POOLS = {"P": "sender_pool", "D": "receiver_pool"}


class Edge(NamedTuple):
    """A step of the world."""

    label: str
    world: World
    kind: str = ""


@dataclass
class Model:
    """The steps of worlds under some bounds, with the given machines."""

    bounds: Bounds = Bounds()
    machines: Machines = Machines()
    _lanes: list[Lane] = field(default_factory=list)
    _numbers: dict[Lane, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._steps = cache(self._find_steps)

    def start(self) -> World:
        lane, source = Lane(), ""
        if self.bounds.kind != "prefill":
            lane, source = lane._replace(source="running"), "sequence"
        run = self._run(lane, "RPD")
        run.begin()
        first = self._number(run.lane())
        lanes = self.bounds.lanes
        free = ("",) * self.bounds.blocks
        held = tuple(f"{source} {number}" for number in range(lanes)) if source else ()
        return World((first,) * lanes, "RPD", (*held, *free)[: max(len(held), len(free))], free)

    def lane(self, number: int) -> Lane:
        return self._lanes[number]

    def edges(self, world: World) -> Iterator[Edge]:
        """Every step that can happen."""
        for place, number in enumerate(world.lanes):
            for step in self._steps(number, world.up):
                if counted := self._count(world, step.kind):
                    yield from self._apply(counted, place, step)
        yield from self._read_steps(world)
        if self.bounds.local and "D" in world.up:
            yield from self._local_steps(world)
        if counted := self._count(world, FAULT):
            yield from self._crashes(counted)

    def _count(self, world: World, kind: str) -> World | None:
        """Counts a step against the bounds; None if they forbid it."""
        bounds = self.bounds
        if kind == LOSS:
            allowed = world.losses < bounds.losses
            return world._replace(losses=world.losses + 1) if allowed else None
        if bounds.faults == ANY or not (kind == FAULT or (kind == TIMER and not bounds.timers)):
            return world
        return world._replace(faults=world.faults + 1) if world.faults < bounds.faults else None

    def is_over(self, world: World) -> bool:
        """Whether every stream has ended and nothing is held."""
        lanes = [self._lanes[number] for number in world.lanes]
        held = {owner for owner in (*world.sender_pool, *world.receiver_pool) if owner}
        return (
            not world.reads
            and held <= {"local"}
            and all(
                lane.item != "live"
                and lane.sender is None
                and lane.receiver is None
                and not (lane.source or lane.target)
                for lane in lanes
            )
        )

    def check(self, world: World) -> None:
        """Raises Violation for a block whose owner does not exist."""
        for place, number in enumerate(world.lanes):
            lane = self._lanes[number]
            expected = {
                "P": {
                    f"lease {place}": lane.sender is not None
                    and lane.sender.phase is sending.Phase.COMMITTED,
                    f"sequence {place}": lane.source == "running",
                },
                "D": {
                    f"lease {place}": lane.receiver is not None,
                    f"sequence {place}": lane.target in ("running", "started"),
                },
            }
            for worker, owners in expected.items():
                pool: tuple[str, ...] = getattr(world, POOLS[worker])
                for owner, exists in owners.items():
                    if pool.count(owner) != exists:
                        raise Violation(
                            f"{worker} has {pool.count(owner)} blocks of {owner}, not {int(exists)}"
                        )

    # Steps of a lane.

    def _run(self, lane: Lane, up: str) -> LaneRun:
        return LaneRun(self.machines, self.bounds, lane, up)

    def _number(self, lane: Lane) -> int:
        if (number := self._numbers.get(lane)) is None:
            number = self._numbers[lane] = len(self._lanes)
            self._lanes.append(lane)
        return number

    def _step(
        self,
        label: str,
        here: Here,
        do: Callable[[LaneRun], None],
        kind: str = "",
    ) -> Step:
        run = self._run(*here)
        do(run)
        return Step(label, self._number(run.lane()), tuple(run.effects), kind)

    def _find_steps(self, number: int, up: str) -> list[Step]:
        here = Here(self._lanes[number], up)
        steps = list(self._deliveries(here))
        if "R" in up:
            steps += self._router_steps(here)
        if "P" in up:
            steps += self._sender_steps(here)
        if "D" in up:
            steps += self._receiver_steps(here)
        return steps

    def _deliveries(self, here: Here) -> Iterator[Step]:
        lane, up = here
        parties = {"R": "router", "P": "sender", "D": "receiver"}
        for stream, ends in STREAMS.items():
            now: Stream = getattr(lane, stream)
            if now.up and set(ends) <= set(up):
                for late in (False, True):
                    yield self._step(
                        f"{stream} breaks{' late' if late else ''}",
                        here,
                        partial(LaneRun.break_stream, stream=stream, late=late),
                        FAULT,
                    )
            for side, end in zip(("to_left", "to_right"), ends, strict=True):
                messages = getattr(now, side)
                if not messages or end not in up:
                    continue
                name, party = f"{messages[0].kind} {messages[0].value}", parties[end]

                deliver = partial(LaneRun.deliver, stream=stream, side=side, at=party)
                yield self._step(f"{party} gets {name}", here, deliver)
                if messages[0] != LOST:
                    yield self._step(
                        f"{party} gets {name}, to be repeated",
                        here,
                        partial(deliver, repeat=True),
                        LOSS,
                    )
                    yield self._step(
                        f"{name} to {party} is dropped",
                        here,
                        partial(LaneRun.drop, stream=stream, side=side),
                        LOSS,
                    )

    def _router_steps(self, here: Here) -> Iterator[Step]:
        handoff = here.lane.handoff
        if handoff is None:
            return
        yield self._step("the client cancels", here, LaneRun.cancel, FAULT)
        if handoff.is_parked:
            yield self._step(
                "the client reads again", here, lambda run: run.advance_router(routing.Resumed())
            )
        if handoff.result is routing.Result.MOVED:
            # The deadline of every sequence on a worker.
            yield self._step("tokens stay away", here, LaneRun.migrate, TIMER)
        elif self.machines.router_has_deadline(handoff):
            yield self._step(
                "the router's deadline passes",
                here,
                lambda run: run.advance_router(routing.Late()),
                TIMER,
            )

    def _sender_steps(self, here: Here) -> Iterator[Step]:
        lane = here.lane
        lease = lane.sender
        if lane.source == "waiting":
            started = self._number(lane._replace(source="running"))
            yield Step("the prefill starts", started, (Effect("P", "allocate"),))
        if lease is None:
            if lane.source == "running":
                yield self._step(
                    "the sequence finishes", here, lambda run: run.finish_source("finished")
                )
            return
        if lane.source == "running" and lease.computed < self.bounds.parts:
            yield self._step("a part is computed", here, LaneRun.compute)
            yield self._step(
                "the computation fails", here, lambda run: run.finish_source("error"), FAULT
            )
        if lane.source == "running" and lease.computed == self.bounds.parts:
            yield self._step("the sender commits", here, LaneRun.hand_over)
            yield self._step("the sender finishes", here, lambda run: run.finish_source("finished"))
        if self.machines.sender_expires(lease):
            yield self._step(
                "the sender's lease expires",
                here,
                lambda run: run.advance_sender(sending.Expire()),
                TIMER,
            )

    def _receiver_steps(self, here: Here) -> Iterator[Step]:
        lane = here.lane
        if lane.target == "running":
            step = self._step(
                "the receiver's first token",
                here._replace(lane=lane._replace(target="started")),
                lambda run: run.send("to_receiver", "to_left", "token"),
            )
            yield step
        if lane.target == "started":
            yield self._step("the receiver finishes", here, lambda run: run.end_target("finished"))
        lease = lane.receiver
        if lease is not None and self.machines.receiver_expires(lease):
            yield self._step(
                "the receiver's lease expires",
                here,
                lambda run: run.advance_receiver(receiving.Expire()),
                TIMER,
            )

    # Steps of the world.

    def _apply(self, world: World, place: int, step: Step) -> Iterator[Edge]:
        lanes = (*world.lanes[:place], step.lane, *world.lanes[place + 1 :])
        after = world._replace(lanes=lanes)
        for effect in step.effects:
            changed = self._effect(after, place, effect)
            if changed is None:
                return
            after = changed
        yield Edge(f"{place}: {step.label}", after, step.kind)

    def _effect(self, world: World, place: int, effect: Effect) -> World | None:
        """The world after an effect; None where a sequence waits for a free block."""
        match effect:
            case Effect("D", "reserve"):
                return self._reserve(world, place)
            case Effect("D", "read", part):
                block = world.receiver_pool.index(f"lease {place}")
                return world._replace(reads=world.reads | {Read(place, part, block)})
            case Effect(worker, "allocate"):
                return own(world, worker, "", f"sequence {place}")
            case Effect(worker, kind):
                return give(world, worker, place, kind)

    def _reserve(self, world: World, place: int) -> World:
        granted = own(world, "D", "", f"lease {place}")
        run = self._run(self._lanes[world.lanes[place]], world.up)
        run.reserved(full=granted is None)
        after = granted or world
        lanes = (*after.lanes[:place], self._number(run.lane()), *after.lanes[place + 1 :])
        return after._replace(lanes=lanes)

    def _read_steps(self, world: World) -> Iterator[Edge]:
        for read in world.reads:
            owner = world.receiver_pool[read.block] or "nobody"
            if owner != f"lease {read.lane}":
                raise Violation(f"a read may write to a block of {owner}")
            held = {f"lease {read.lane}", f"sequence {read.lane}"} & set(world.sender_pool)
            # A checksum may find bad content and may not, so the protocol must not need it.
            computed = self._lanes[world.lanes[read.lane]].computed
            is_final = held and read.part < computed
            content = GOOD if is_final or not self.bounds.one_sided else BAD
            reachable = "P" in world.up or not self.bounds.one_sided
            if reachable:
                yield self._read_ends(world, read, content, None)
            if counted := self._count(world, FAULT if reachable else ""):
                yield self._read_ends(counted, read, BAD, Problem.READ_FAILED)

    def _read_ends(self, world: World, read: Read, content: int, problem: Problem | None) -> Edge:
        step = self._step(
            f"read {read.part} ends with {problem.value if problem else 'data'}",
            Here(self._lanes[world.lanes[read.lane]], world.up),
            lambda run: run.read_ended(read.part, content=content, problem=problem),
            FAULT if problem and "P" in world.up else "",
        )
        before = world._replace(reads=world.reads - {read})
        (edge,) = self._apply(before, read.lane, step)
        return edge

    def _local_steps(self, world: World) -> Iterator[Edge]:
        if taken := own(world, "D", "", "local"):
            yield Edge("a local sequence starts", taken)
        if freed := own(world, "D", "local", ""):
            yield Edge("a local sequence ends", freed)

    def _crashes(self, world: World) -> Iterator[Edge]:
        for party in world.up:
            up = world.up.replace(party, "")
            lanes = []
            for number in world.lanes:
                run = self._run(self._lanes[number], up)
                run.crash(party)
                lanes.append(self._number(run.lane()))
            after = world._replace(lanes=tuple(lanes), up=up)
            if party in POOLS:
                empty = ("",) * len(getattr(world, POOLS[party]))
                after = with_pool(after, party, empty)
            if party == "D":
                after = after._replace(reads=frozenset())
            yield Edge(f"{party} crashes", after, FAULT)


def with_pool(world: World, worker: str, pool: tuple[str, ...]) -> World:
    if worker == "P":
        return world._replace(sender_pool=pool)
    return world._replace(receiver_pool=pool)


def own(world: World, worker: str, before: str, after: str) -> World | None:
    """Changes the owner of one block; None without such a block."""
    pool: tuple[str, ...] = getattr(world, POOLS[worker])
    if before not in pool:
        return None
    place = pool.index(before)
    return with_pool(world, worker, (*pool[:place], after, *pool[place + 1 :]))


def give(world: World, worker: str, place: int, kind: str) -> World:
    """Passes blocks between the lease, the sequence and the pool."""
    lease, sequence = f"lease {place}", f"sequence {place}"
    before, after = {
        "free lease": (lease, ""),
        "free sequence": (sequence, ""),
        "lease to sequence": (lease, sequence),
        "sequence to lease": (sequence, lease),
    }[kind]
    changed = own(world, worker, before, after)
    if changed is None:
        raise Violation(f"{worker} has no block for {kind!r}")
    return changed
