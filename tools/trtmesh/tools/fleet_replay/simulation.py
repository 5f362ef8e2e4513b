"""A simulated fleet: the result of a recorded trace under a policy.

Placement is the router's own code: load guard, KV index, learned rates and `place`. A worker is the simulated backend's
engine, with the scheduler of every backend, in virtual time (worker.py):

* a step grows with the number of sequences, with the largest rank of their adapters, and by the prompt tokens in it;
* the KV of an item with two workers is received beside the computation, one item after another, in blocks that were
  reserved before; without room for them the second worker computes the prompt, too;
* adapters are delivered one after another to host memory, and copied to a slot on the device before an item runs;
* load reports come at a fixed interval;
* every router has its own KV index, bookings and rates, and gets every event and report of every worker.

Left out: siblings, slow start, the breaker, admission limits, every sequence of an item but the first, and lost or
unequal workers. A worker's pool holds the longest item, however small the fleet's model says it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random

from trtmesh.chassis.adapter_content import number_of
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, Output, Stopping
from trtmesh.engine.adapter_store import StoredAdapter
from trtmesh.engine.backend import (
    BlocksRemoved,
    BlocksStored,
    Offered,
    Reserved,
    SequenceEnd,
    StepOutput,
)
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence
from trtmesh.engine.scheduling.leases import Outgoing
from trtmesh.router.kv_index import KvIndex
from trtmesh.router.placement import (
    POLICIES,
    AdapterNeed,
    Decision,
    KvFacts,
    PlacementQuery,
    Role,
    WorkerSnapshot,
    place_split,
)
from trtmesh.router.placement.load_guard import Booking, LoadGuard, Reservation
from trtmesh.router.placement.rates import Ewma, Typical, typical_of
from trtmesh.router.placement.shares import AdapterShares
from trtmesh.router.placement.split import LAST_PART
from trtmesh.tools.fleet_replay.adapters import changes_of, named
from trtmesh.tools.fleet_replay.fleet_model import FleetModel, ReplayResult
from trtmesh.tools.fleet_replay.trace import MOONCAKE_BLOCK_TOKENS, Arrival
from trtmesh.tools.fleet_replay.worker import ReplayedWorker, VirtualTime
from trtmesh.v1 import generation_pb2 as pb

MODEL = "replayed"

KV = KvFacts(b"replayed", frozenset(), 0, frozenset({0}))
"""Every worker can hand over to every other."""

CONFIG = GenerationConfig(output=Output(perf_metrics=True))
"""Every item tells its first token."""

NAMES = 2**64
"""Names of blocks are smaller."""


@dataclass(slots=True, eq=False)
class _Item:
    """An item on a worker, or on its way to one."""

    number: int
    arrival: Arrival
    names: list[int]
    """Of the full blocks of the prompt."""
    adapter: AdapterNeed | None
    router: _Router
    booking: Booking
    """On the worker where the item is, or where it is sent."""
    decode: _Leg | None = None
    """Where the item decodes, if elsewhere, until its KV is there."""
    began: float = 0.0
    """Start of the prefill that is handed over."""
    first: float = 0.0
    """Time of the first token; 0 before it."""
    is_received: bool = False
    """Whether its KV came from another worker."""

    @property
    def lease_id(self) -> str:
        return str(self.number)


@dataclass(frozen=True, slots=True)
class _Leg:
    """Where an item decodes that is computed elsewhere."""

    worker: ReplayedWorker
    booking: Booking
    reserved: Reserved


def replay(
    arrivals: Sequence[Arrival], policy: str, fleet: FleetModel, *, seed: int = 0
) -> ReplayResult:
    """Runs a trace to the end under one policy."""
    simulation = _Simulation(arrivals, policy, fleet, seed)
    for arrival in arrivals:
        simulation.time.run_until(arrival.seconds)
        simulation.arrive(arrival)
    simulation.time.run_until(float("inf"))
    return simulation.outcome(arrivals)


class _Router:
    """What one router knows, and its placements."""

    def __init__(
        self, workers: Mapping[str, ReplayedWorker], policy: str, model: FleetModel, seed: int
    ) -> None:
        self.index = KvIndex(model.index_blocks)
        self.guards = {a: LoadGuard(partial(self._touch, a)) for a in workers}
        self.new_tokens = Ewma()
        self._workers = workers
        self._policy = policy
        self._model = model
        self._has_roles = {*model.roles} != {Role.MIXED}
        self._random = Random(seed)  # noqa: S311 - chance that must be repeatable
        self._turns = count(1)
        self._last_turns = dict.fromkeys(workers, 0)
        self._shares = AdapterShares()
        self._typical = Typical()
        self._snapshots: dict[str, WorkerSnapshot] = {}
        self._touched = {*workers}

    def place(
        self, arrival: Arrival, names: list[int], block_tokens: int, *, prefixes: bool
    ) -> Decision:
        """Decides on an item; `names` are its blocks."""
        now = arrival.seconds
        found = self.index.match(names, now) if prefixes else {}
        most = arrival.prompt_tokens - 1
        query = PlacementQuery(
            model=MODEL,
            has_roles=self._has_roles,
            handoff_seconds=self._typical.handoff_seconds,
            adapter=self._need(arrival),
            prompt_tokens=arrival.prompt_tokens,
            new_tokens=round(self._typical.new_tokens),
            cached_tokens={a: min(n * block_tokens, most) for a, n in found.items()},
            prefix=names[0] if prefixes and arrival.blocks else None,
            draw=self._random.getrandbits(32),
        )
        decision = place_split(self._policy, self._fleet(now), query, self._model.handoff)
        self._shares.add(query.adapter, query.new_tokens * decision.chosen.step_seconds, now)
        return decision

    def take_turn(self, address: str) -> None:
        """Notes a placement on a worker."""
        self._last_turns[address] = next(self._turns)
        self._touched.add(address)

    def refresh(self) -> None:
        """Updates the typical rates, as a router does now and then."""
        rates = [guard.rates for guard in self.guards.values()]
        self._typical = typical_of(rates, self.new_tokens.value)
        takers = tuple((w.address, w.adapters.slots.slots) for w in self._workers.values())
        self._shares.settle(takers, self._typical)
        self._touched.update(self._workers)

    def _touch(self, address: str) -> None:
        self._touched.add(address)

    def _need(self, arrival: Arrival) -> AdapterNeed | None:
        if not arrival.adapter:
            return None
        need = named(arrival.adapter, number_of(arrival.adapter), arrival.adapter_rank)
        return replace(need, outlook=self._shares.outlook(need, self._typical))

    def _fleet(self, now: float) -> tuple[WorkerSnapshot, ...]:
        """The workers at this moment; only those with news are read again, as in a router."""
        model = self._model
        for address in self._touched:
            load = self.guards[address].figures(
                self._typical, model.max_batch_size, model.kv_token_bytes, now
            )
            self._snapshots[address] = WorkerSnapshot(
                address=address,
                worker=address,
                model=MODEL,
                problem="",
                supported_fields=frozenset(),
                last_turn=self._last_turns[address],
                role=self._workers[address].role,
                kv=KV,
                **load,
            )
        self._touched.clear()
        return tuple(self._snapshots[address] for address in self._workers)


class _Simulation:
    def __init__(
        self, arrivals: Sequence[Arrival], policy: str, model: FleetModel, seed: int
    ) -> None:
        self.time = VirtualTime()
        self._policy = policy
        self._looks_at_prefixes = POLICIES[policy].looks_at_prefixes
        self._model = model
        named_blocks = (a.block_tokens for a in arrivals if a.blocks)
        self._block_tokens = min(named_blocks, default=MOONCAKE_BLOCK_TOKENS)
        longest = max(a.prompt_tokens + max(1, a.new_tokens) for a in arrivals)
        pool = -(-max(longest, model.cache_tokens) // self._block_tokens)
        sizes = pool, self._block_tokens
        self._workers = {
            f"{n}": ReplayedWorker(f"{n}", role, model, sizes, self.time, self._deliver)
            for n, role in enumerate(model.roles)
        }
        self._routers = [
            _Router(self._workers, policy, model, seed + n) for n in range(model.routers)
        ]
        self._items: dict[int, _Item] = {}
        """The live ones by number, which is the key of their sequences."""
        self._items_by_worker = dict.fromkeys(self._workers, 0)
        self._computed = dict.fromkeys(self._workers, 0)
        self._numbers = count()
        self._refreshed_at = 0.0
        self._reused = 0
        self._first: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._gaps: list[float] = []
        self._handoffs = 0
        self._kv_events = 0
        self._kv_event_blocks = 0

    def arrive(self, arrival: Arrival) -> None:
        """Places an item as a router would."""
        self._report(arrival.seconds)
        number = next(self._numbers)
        names = _names(arrival, number, self._block_tokens)
        router = self._routers[number % len(self._routers)]
        decision = router.place(
            arrival, names, self._block_tokens, prefixes=self._looks_at_prefixes
        )
        self._start(number, router, arrival, names, decision)

    def _start(
        self, number: int, router: _Router, arrival: Arrival, names: list[int], decision: Decision
    ) -> None:
        """Queues an item where its prompt is computed, and books both legs."""
        now, adapter = arrival.seconds, decision.query.adapter
        chosen = self._workers[decision.chosen.address]
        prefill = self._workers[decision.prefill.address]
        self._items_by_worker[chosen.address] += 1
        leg = None
        if prefill is not chosen:
            leg = self._reserve(router, chosen, number, names, decision)
        cached = decision.cached_tokens
        if leg is None:
            cached = decision.query.cached_tokens.get(chosen.address, 0)
            prefill = chosen
        self._take_turn(router, prefill, names, now)
        guard = router.guards[prefill.address]
        booking = guard.book(arrival.prompt_tokens - cached, 1, now, adapter)
        item = self._items[number] = _Item(number, arrival, names, adapter, router, booking, leg)
        if adapter:
            prefill.adapters.fetch(adapter)
        self._submit(prefill, item)

    def _reserve(
        self,
        router: _Router,
        worker: ReplayedWorker,
        number: int,
        names: list[int],
        decision: Decision,
    ) -> _Leg | None:
        """Reserves blocks where an item is to decode; None without room."""
        query, now = decision.query, self.time.now
        reserved = worker.reserve(str(number), query.prompt_tokens, names)
        if reserved.error:
            return None
        self._take_turn(router, worker, names, now)
        lacking = query.prompt_tokens - query.cached_tokens.get(worker.address, 0)
        reservation = Reservation(lacking, len(reserved.blocks))
        booking = router.guards[worker.address].book(0, 1, now, query.adapter, reservation)
        if query.adapter:
            worker.adapters.fetch(query.adapter)
        return _Leg(worker, booking, reserved)

    def _take_turn(
        self, router: _Router, worker: ReplayedWorker, names: list[int], now: float
    ) -> None:
        router.take_turn(worker.address)
        if self._looks_at_prefixes:
            router.index.expect(worker.address, names, now)

    def _submit(self, worker: ReplayedWorker, item: _Item) -> None:
        """Submits an item, or its second half, once the worker has the adapter."""
        adapter = None
        if item.adapter and (adapter := worker.adapters.hold(item.adapter)) is None:
            worker.adapters.fetch(item.adapter, partial(self._submit, worker, item))
            return
        worker.submit(self._sequence(item, adapter))

    def _sequence(self, item: _Item, adapter: StoredAdapter | None) -> SimulatedSequence:
        """The sequence of an item, or of its second half. Names say what is equal, and nobody reads the tokens."""
        prompt_tokens = item.arrival.prompt_tokens
        tokens = prompt_tokens + item.is_received
        limit = prompt_tokens + max(1, item.arrival.new_tokens)
        return SimulatedSequence(
            key=item.number,
            keys=[item.number],
            tokens=[0] * tokens,
            rule=EndRule(Stopping(), (), prompt_tokens, limit),
            config=CONFIG,
            submitted_tokens=tokens,
            adapter=adapter,
            hashes=[*item.names],
            outgoing=Outgoing(item.lease_id, prompt_tokens) if item.decode else None,
            receiver_lease=item.lease_id if item.is_received else "",
            is_prefill=item.decode is not None,
            stream=item.number.to_bytes(16, "little"),
            is_single=True,
        )

    def _deliver(self, worker: ReplayedWorker, output: StepOutput) -> None:
        """What a worker tells the routers."""
        for event in output.kv_events if self._looks_at_prefixes else ():
            if isinstance(event, BlocksStored | BlocksRemoved):
                self._kv_events += 1
                self._kv_event_blocks += len(event.block_hashes)
                for router in self._routers:
                    change = router.index.store
                    if isinstance(event, BlocksRemoved):
                        change = router.index.remove
                    change(worker.address, event.block_hashes)
        if output.adapters:
            for router in self._routers:
                guard = router.guards[worker.address]
                guard.adapters_moved(changes_of(output.adapters), self.time.now)
        for news in output.handoffs:
            if isinstance(news, Offered):
                self._items[news.key].began = worker.step_began_at
        for start in output.starts:
            self._started(worker, self._items[start.key])
        for end in output.ends:
            self._ended(worker, self._items[end.key], end)

    def _started(self, worker: ReplayedWorker, item: _Item) -> None:
        now = self.time.now
        item.booking.started(now)
        if item.first:
            item.router.guards[worker.address].rates.learn_handoff(now - item.first)
        else:
            item.first = now
            self._first[item.number] = now - item.arrival.seconds

    def _ended(self, worker: ReplayedWorker, item: _Item, end: SequenceEnd) -> None:
        """An item ended on a worker, or moves on."""
        assert end.error is None, end.error
        now, arrival = self.time.now, item.arrival
        item.booking.leave(now)
        if not item.is_received:
            self._reused += end.cached_prompt_tokens
            self._computed[worker.address] += arrival.prompt_tokens - end.cached_prompt_tokens
        if end.reason == pb.FINISH_REASON_HANDOFF:
            self._hand_over(worker, item)
            return
        if leg := item.decode:
            leg.worker.drop(item.lease_id)
            leg.booking.leave(now)
        del self._items[item.number]
        tokens = arrival.new_tokens
        item.router.new_tokens.add(tokens)
        self._ends[item.number] = now - arrival.seconds
        if tokens > 1:
            self._gaps.append((now - item.first) / (tokens - 1))

    def _hand_over(self, sender: ReplayedWorker, item: _Item) -> None:
        """Moves the KV that the other worker lacks; most of it moved while the prompt was computed."""
        leg, model = item.decode, self._model
        assert leg is not None
        worker = leg.worker
        self._handoffs += 1
        tokens = item.arrival.prompt_tokens - leg.reserved.present_tokens
        seconds = tokens * model.kv_token_bytes / model.kv_bytes_per_second
        begun = max(item.began, worker.received_at)
        worker.received_at = max(begun + seconds, self.time.now + LAST_PART * seconds)
        worker.received_bytes += tokens * model.kv_token_bytes
        worker.receiving_seconds += worker.received_at - begun
        item.booking, item.decode, item.is_received = leg.booking, None, True
        continues_at = worker.received_at + model.handoff_seconds
        self.time.at(continues_at, partial(self._continue, sender, worker, item))

    def _continue(self, sender: ReplayedWorker, receiver: ReplayedWorker, item: _Item) -> None:
        """The KV has arrived."""
        sender.drop(item.lease_id)
        self._submit(receiver, item)

    def outcome(self, arrivals: Sequence[Arrival]) -> ReplayResult:
        workers = self._workers.values()
        largest = max(self._routers, key=lambda router: len(router.index))
        return ReplayResult(
            policy=self._policy,
            items=len(arrivals),
            prompt_tokens=sum(a.prompt_tokens for a in arrivals),
            reused_tokens=self._reused,
            reusable_tokens=_reusable(arrivals),
            items_by_worker=tuple(self._items_by_worker.values()),
            computed_by_worker=tuple(self._computed.values()),
            first_token_seconds=tuple(self._first[n] for n in range(len(arrivals))),
            end_seconds=tuple(self._ends[n] for n in range(len(arrivals))),
            gap_seconds=tuple(self._gaps),
            busy_by_worker=tuple(w.busy_seconds for w in workers),
            seconds=self.time.now,
            kv_events=self._kv_events,
            kv_event_blocks=self._kv_event_blocks,
            index_blocks=len(largest.index),
            index_bytes=largest.index.approximate_bytes,
            has_roles={*self._model.roles} != {Role.MIXED},
            handoffs=self._handoffs,
            adapter_items=sum(bool(a.adapter) for a in arrivals),
            adapter_deliveries=sum(w.adapters.store.loads for w in workers),
            adapter_copies=sum(w.adapters.copies for w in workers),
        )

    def _report(self, now: float) -> None:
        """Takes the due load reports, and updates the fleet's typical rates."""
        due = self._model.report_seconds
        for worker in self._workers.values():
            if now - worker.reported_at >= due:
                report = worker.report()
                for router in self._routers:
                    router.guards[worker.address].take_report(report)
        if now - self._refreshed_at >= due:
            self._refreshed_at = now
            for router in self._routers:
                router.refresh()


def _names(arrival: Arrival, number: int, tokens_per_block: int) -> list[int]:
    """Names of the full blocks of a prompt: by the trace as far as it goes, then by the number of the item."""
    blocks, full = arrival.blocks, arrival.prompt_tokens // tokens_per_block
    if arrival.block_tokens == tokens_per_block:
        names = [name % NAMES for name in blocks[:full]]
    else:
        # Equal blocks of the trace have equal tokens before them.
        ends = range(tokens_per_block - 1, full * tokens_per_block, tokens_per_block)
        places = [end // arrival.block_tokens for end in ends]
        known = [(blocks[at], n) for n, at in enumerate(places) if at < len(blocks)]
        names = [hash(each) % NAMES for each in known]
    own = NAMES // 2 + (number << 24)
    return names + [own + n for n in range(len(names), full)]


def _reusable(arrivals: Sequence[Arrival]) -> int:
    seen: set[int] = set()
    reusable = 0
    for arrival in arrivals:
        matched = next(
            (n for n, b in enumerate(arrival.blocks) if b not in seen), len(arrival.blocks)
        )
        reusable += min(matched * arrival.block_tokens, arrival.prompt_tokens - 1)
        seen.update(arrival.blocks)
    return reusable
