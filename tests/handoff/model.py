"""A world of one router and two workers: lanes, one for each handoff, and the pools and reads that they share.

A block has one owner: "", "local" (another sequence of the worker), "lease N" or "sequence N" of lane N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

from handoff.lane import (
    ANY,
    BAD,
    FAULT,
    GOOD,
    LOSS,
    LOST,
    STREAMS,
    TIMER,
    Bounds,
    Effect,
    Here,
    Lane,
    LaneRun,
    Machines,
    Step,
    Stream,
    Violation,
)
from trtmesh.engine.handoff import receive_machine as receiving
from trtmesh.engine.handoff import send_machine as sending
from trtmesh.engine.handoff.lease import Problem
from trtmesh.router.handoffs import machine as routing


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

    bounds: Bounds = field(default_factory=Bounds)
    machines: Machines = field(default_factory=Machines)
    _lanes: list[Lane] = field(default_factory=list)
    _numbers: dict[Lane, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._steps = cache(self._find_steps)
        self._crashed = cache(self._crash)

    def start(self) -> World:
        lane, source = Lane(), ""
        if self.bounds.moves:
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
                if (counted := self._count(world, step.kind)) and (
                    edge := self._apply(counted, place, step)
                ):
                    yield edge
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
                    f"lease {place}": has_kv(lane),
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
                # Without messages under way, early and late are the same.
                for late in (False, True) if now.to_left or now.to_right else (False,):
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
                if self.bounds.losses and messages[0] != LOST:
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
        if self.bounds.kind == "halves":
            if handoff.is_parked and handoff.sender is routing.Sender.COMMITTED:
                yield self._step("the client takes the state", here, LaneRun.give)
                yield self._step("the client brings the state", here, LaneRun.adopt)
        elif handoff.is_parked:
            yield self._step(
                "the client reads again",
                here,
                lambda run: run.advance_router(routing.Event.RESUMED),
            )
        if handoff.result is routing.Result.MOVED:
            # The deadline of every sequence on a worker.
            yield self._step("tokens stay away", here, LaneRun.migrate, TIMER)
        elif self.machines.router_has_deadline(handoff):
            yield self._step(
                "the router's deadline passes",
                here,
                lambda run: run.advance_router(routing.Event.LATE),
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
        if lane.source == "running":
            yield from self._computing_steps(here)
        if self.machines.sender_expires(lease):
            yield self._step("the sender's lease expires", here, LaneRun.expire_sender, TIMER)

    def _computing_steps(self, here: Here) -> Iterator[Step]:
        by_state = self.bounds.by_state
        is_computed = by_state or here.lane.computed == self.bounds.parts
        if not is_computed:
            yield self._step("a part is computed", here, LaneRun.compute)
        if by_state or not is_computed:
            yield self._step(
                "the computation fails", here, lambda run: run.finish_source("error"), FAULT
            )
        if is_computed:
            yield self._step("the sender commits", here, LaneRun.hand_over)
            yield self._step("the sender finishes", here, lambda run: run.finish_source("finished"))

    def _receiver_steps(self, here: Here) -> Iterator[Step]:
        lane = here.lane
        if lane.target == "waiting" and self.bounds.by_state:
            yield from self._library_steps(here)
        if lane.target == "running":
            yield self._step("the receiver's first token", here, LaneRun.start_target)
        if lane.target == "started":
            yield self._step("the receiver finishes", here, lambda run: run.end_target("finished"))
        lease = lane.receiver
        if lease is not None and self.machines.receiver_expires(lease):
            yield self._step(
                "the receiver's lease expires",
                here,
                lambda run: run.advance_receiver(receiving.ReceiverEvent.EXPIRED),
                TIMER,
            )

    def _library_steps(self, here: Here) -> Iterator[Step]:
        """A library finds out by itself whether the KV is still there."""
        if "P" in here.up and has_kv(here.lane):
            yield self._step("the library moves the KV", here, LaneRun.fetch_state)
            yield self._step("the library fails", here, LaneRun.lose_target, FAULT)
        else:
            yield self._step("the library finds no KV", here, LaneRun.lose_target)

    # Steps of the world.

    def _apply(self, world: World, place: int, step: Step) -> Edge | None:
        """The step of the world; None where a sequence waits for a free block."""
        lanes = (*world.lanes[:place], step.lane, *world.lanes[place + 1 :])
        after = World(lanes, *world[1:])
        for effect in step.effects:
            changed = self._effect(after, place, effect)
            if changed is None:
                return None
            after = changed
        return Edge(f"{place}: {step.label}", after, step.kind)

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
        edge = self._apply(before, read.lane, step)
        assert edge is not None
        return edge

    def _local_steps(self, world: World) -> Iterator[Edge]:
        if taken := own(world, "D", "", "local"):
            yield Edge("a local sequence starts", taken)
        if freed := own(world, "D", "local", ""):
            yield Edge("a local sequence ends", freed)

    def _crash(self, number: int, party: str, up: str) -> int:
        run = self._run(self._lanes[number], up)
        run.crash(party)
        return self._number(run.lane())

    def _crashes(self, world: World) -> Iterator[Edge]:
        for party in world.up:
            up = world.up.replace(party, "")
            lanes = tuple(self._crashed(number, party, up) for number in world.lanes)
            after = world._replace(lanes=lanes, up=up)
            if party in POOLS:
                empty = ("",) * len(getattr(world, POOLS[party]))
                after = with_pool(after, party, empty)
            if party == "D":
                after = after._replace(reads=frozenset())
            yield Edge(f"{party} crashes", after, FAULT)


def has_kv(lane: Lane) -> bool:
    """Whether the sender's lease has the KV."""
    return lane.sender is not None and lane.sender.phase is sending.SenderPhase.COMMITTED


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
