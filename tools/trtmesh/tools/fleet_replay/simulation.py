"""A simulated fleet: the result of a recorded trace under a policy.

Placement is the router's own code: load guard, KV index, learned rates and `place`. A worker is the simulated backend's
engine, with the scheduler of every backend, in virtual time (worker.py):

* a step grows with the number of sequences, with the largest rank of their adapters, and by the prompt tokens in it;
* the KV of an item with two workers is received beside the computation, one item after another, in blocks that were
  reserved before; without room for them the second worker computes the prompt, too;
* adapters are delivered one after another to host memory, and copied to a slot on the device before an item runs;
* load reports come at a fixed interval.

Left out: siblings, slow start, the breaker, admission limits, every sequence of an item but the first, and lost or
unequal workers. A worker's pool holds the longest item, however small the fleet's model says it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random

from trtmesh.chassis.adapter_content import number_of
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
from trtmesh.engine.stopping import EndRule
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
from trtmesh.router.placement.load_guard import Booking, Reservation
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


class _Simulation:
    def __init__(
        self, arrivals: Sequence[Arrival], policy: str, model: FleetModel, seed: int
    ) -> None:
        self.time = VirtualTime()
        self._policy = policy
        self._looks_at_prefixes = POLICIES[policy].looks_at_prefixes
        self._model = model
        self._random = Random(seed)  # noqa: S311 - chance that must be repeatable
        named_blocks = (a.block_tokens for a in arrivals if a.blocks)
        self._block_tokens = min(named_blocks, default=MOONCAKE_BLOCK_TOKENS)
        longest = max(a.prompt_tokens + max(1, a.new_tokens) for a in arrivals)
        pool = -(-max(longest, model.cache_tokens) // self._block_tokens)
        sizes = pool, self._block_tokens
        self._workers = {
            f"{n}": ReplayedWorker(f"{n}", role, model, sizes, self.time, self._deliver)
            for n, role in enumerate(model.roles)
        }
        self._items: dict[int, _Item] = {}
        """The live ones by number, which is the key of their sequences."""
        self._items_by_worker = dict.fromkeys(self._workers, 0)
        self._computed = dict.fromkeys(self._workers, 0)
        self._has_roles = {*model.roles} != {Role.MIXED}
        self._shares = AdapterShares()
        self._index = KvIndex(10_000_000)
        self._numbers = count()
        self._turns = count(1)
        self._typical = Typical()
        self._new_tokens = Ewma()
        self._typical_at = 0.0
        self._reused = 0
        self._first: list[float] = []
        self._ends: list[float] = []
        self._gaps: list[float] = []
        self._handoffs = 0

    def arrive(self, arrival: Arrival) -> None:
        """Places an item as a router would."""
        now = arrival.seconds
        self._report(now)
        number = next(self._numbers)
        names = _names(arrival, number, self._block_tokens)
        found = self._index.match(names, now) if self._looks_at_prefixes else {}
        most = arrival.prompt_tokens - 1
        adapter = self._need(arrival)
        query = PlacementQuery(
            model=MODEL,
            has_roles=self._has_roles,
            handoff_seconds=self._typical.handoff_seconds,
            adapter=adapter,
            prompt_tokens=arrival.prompt_tokens,
            new_tokens=round(self._typical.new_tokens),
            cached_tokens={a: min(n * self._block_tokens, most) for a, n in found.items()},
            prefix=names[0] if self._looks_at_prefixes and arrival.blocks else None,
            draw=self._random.getrandbits(32),
        )
        snapshots = [self._snapshot(w, now) for w in self._workers.values()]
        decision = place_split(self._policy, snapshots, query, self._model.handoff)
        self._shares.add(adapter, query.new_tokens * decision.chosen.step_seconds, now)
        self._start(number, arrival, names, decision)

    def _start(self, number: int, arrival: Arrival, names: list[int], decision: Decision) -> None:
        """Queues an item where its prompt is computed, and books both legs."""
        now, adapter = arrival.seconds, decision.query.adapter
        chosen = self._workers[decision.chosen.address]
        prefill = self._workers[decision.prefill.address]
        self._items_by_worker[chosen.address] += 1
        leg = None
        if prefill is not chosen:
            leg = self._reserve(chosen, number, names, decision)
        cached = decision.cached_tokens
        if leg is None:
            cached = decision.query.cached_tokens.get(chosen.address, 0)
            prefill = chosen
        self._take_turn(prefill, names, now)
        booking = prefill.guard.book(arrival.prompt_tokens - cached, 1, now, adapter)
        item = self._items[number] = _Item(number, arrival, names, adapter, booking, leg)
        if adapter:
            prefill.adapters.fetch(adapter)
        self._submit(prefill, item)

    def _reserve(
        self, worker: ReplayedWorker, number: int, names: list[int], decision: Decision
    ) -> _Leg | None:
        """Reserves blocks where an item is to decode; None without room."""
        query, now = decision.query, self.time.now
        reserved = worker.reserve(str(number), query.prompt_tokens, names)
        if reserved.error:
            return None
        self._take_turn(worker, names, now)
        lacking = query.prompt_tokens - query.cached_tokens.get(worker.address, 0)
        reservation = Reservation(lacking, len(reserved.blocks))
        booking = worker.guard.book(0, 1, now, query.adapter, reservation)
        if query.adapter:
            worker.adapters.fetch(query.adapter)
        return _Leg(worker, booking, reserved)

    def _take_turn(self, worker: ReplayedWorker, names: list[int], now: float) -> None:
        worker.last_turn = next(self._turns)
        if self._looks_at_prefixes:
            self._index.expect(worker.address, names, now)

    def _need(self, arrival: Arrival) -> AdapterNeed | None:
        if not arrival.adapter:
            return None
        need = named(arrival.adapter, number_of(arrival.adapter), arrival.adapter_rank)
        return replace(need, outlook=self._shares.outlook(need, self._typical))

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
        """What a worker tells the router."""
        for event in output.kv_events if self._looks_at_prefixes else ():
            if isinstance(event, BlocksStored):
                self._index.store(worker.address, event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                self._index.remove(worker.address, event.block_hashes)
        if output.adapters:
            worker.guard.adapters_moved(changes_of(output.adapters), self.time.now)
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
            worker.guard.rates.learn_handoff(now - item.first)
        else:
            item.first = now
            self._first.append(now - item.arrival.seconds)

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
        self._new_tokens.add(tokens)
        self._ends.append(now - arrival.seconds)
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
        return ReplayResult(
            policy=self._policy,
            items=len(arrivals),
            prompt_tokens=sum(a.prompt_tokens for a in arrivals),
            reused_tokens=self._reused,
            reusable_tokens=_reusable(arrivals),
            items_by_worker=tuple(self._items_by_worker.values()),
            computed_by_worker=tuple(self._computed.values()),
            first_token_seconds=tuple(self._first),
            end_seconds=tuple(self._ends),
            gap_seconds=tuple(self._gaps),
            has_roles=self._has_roles,
            handoffs=self._handoffs,
            adapter_items=sum(bool(a.adapter) for a in arrivals),
            adapter_deliveries=sum(w.adapters.store.loads for w in workers),
            adapter_copies=sum(w.adapters.copies for w in workers),
        )

    def _snapshot(self, worker: ReplayedWorker, now: float) -> WorkerSnapshot:
        model = self._model
        return WorkerSnapshot(
            address=worker.address,
            worker=worker.address,
            model=MODEL,
            problem="",
            supported_fields=frozenset(),
            last_turn=worker.last_turn,
            role=worker.role,
            kv=KV,
            **worker.guard.figures(self._typical, model.max_batch_size, model.kv_token_bytes, now),
        )

    def _report(self, now: float) -> None:
        """Takes the due load reports, and updates the fleet's typical rates."""
        workers = self._workers.values()
        for worker in workers:
            if now - worker.reported_at >= self._model.report_seconds:
                worker.report()
        if now - self._typical_at >= self._model.report_seconds:
            self._typical_at = now
            rates = [worker.guard.rates for worker in workers]
            self._typical = typical_of(rates, self._new_tokens.value)
            takers = tuple((w.address, w.adapters.slots.slots) for w in workers)
            self._shares.settle(takers, self._typical)


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
