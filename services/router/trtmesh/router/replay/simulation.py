"""A simulated fleet: the result of a recorded trace under a policy.

Placement is the router's own code: load guard, KV index, learned rates and `place`. A worker is a model of an engine:

* prompts prefill one after another at a fixed rate, cached tokens at no cost; those that decode elsewhere in the order
  of a prefill worker, the shortest first with aging;
* sequences decode side by side, a token per step; steps grow with the number of sequences, with the largest rank of
  their adapters, and by a chunk of a prompt while there is one;
* the KV of an item with two workers is received beside the computation, one item after another;
* the cache evicts least recently used blocks;
* adapters are delivered one after another to host memory, and copied to a slot on the device before an item runs;
* load reports come at a fixed interval.

Left out: siblings, slow start, the breaker, admission limits, KV blocks in use, every sequence of an item but the
first, and lost or unequal workers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random

from trtmesh.chassis.adapter_content import number_of
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
from trtmesh.router.placement.rates import (
    Ewma,
    Report,
    Typical,
    typical_of,
)
from trtmesh.router.placement.residency import AdapterKey
from trtmesh.router.placement.shares import AdapterShares
from trtmesh.router.placement.split import LAST_PART
from trtmesh.router.replay.adapter_memory import AdapterMemory, named
from trtmesh.router.replay.fleet_model import FleetModel, Outcome
from trtmesh.router.replay.trace import Arrival

MODEL = "replayed"

KV = KvFacts(b"replayed", frozenset(), 0, frozenset({0}))
"""Every worker can hand over to every other."""


@dataclass(slots=True)
class _Running:
    """An item on a worker, or the leg there."""

    arrival: Arrival
    booking: Booking
    adapter: AdapterNeed | None
    uncached: int = 0
    """Prompt tokens to compute."""
    began: float = 0.0
    """Start of the prefill."""
    first: float = 0.0
    """Time of the first token."""
    decode: _Leg | None = None
    """Where the item decodes, if elsewhere."""
    is_computed: bool = False
    """Whether the prompt's KV came from another worker."""


@dataclass(slots=True)
class _Leg:
    worker: _Worker
    booking: Booking


@dataclass(slots=True)
class _Worker:
    address: str
    role: Role
    adapters: AdapterMemory
    guard: LoadGuard = field(default_factory=lambda: LoadGuard(lambda: None))
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    cached_tokens: int = 0
    waiting: deque[_Running] = field(default_factory=deque)
    running: int = 0
    prompts: list[tuple[float, int, _Running]] = field(default_factory=list)
    """Items before their prefill, in its order."""
    queued_tokens: int = 0
    """Their tokens to compute."""
    prefill_free_at: float = 0.0
    is_prefilling: bool = False
    received_at: float = 0.0
    """End of the last transfer of KV."""
    received_bytes: int = 0
    receiving_seconds: float = 0.0
    link_free_at: float = 0.0
    """End of the last delivery of an adapter."""
    undelivered: dict[AdapterKey, list[_Running]] = field(default_factory=dict)
    """Items by the adapter that they wait for."""
    decoding: list[tuple[float, int, _Running]] = field(default_factory=list)
    """Items by the count of steps at which they end."""
    stepped_at: float = 0.0
    generation: int = 0
    """Number of the scheduled end; an earlier one is void."""
    waiting_tokens: int = 0
    reported_at: float = 0.0
    items: int = 0
    computed: int = 0
    steps: float = 0.0
    busy_seconds: float = 0.0


def replay(
    arrivals: Sequence[Arrival], policy: str, fleet: FleetModel, *, seed: int = 0
) -> Outcome:
    """Runs a trace to the end under one policy."""
    simulation = _Simulation(policy, fleet, seed)
    for arrival in arrivals:
        simulation.run_until(arrival.seconds)
        simulation.arrive(arrival)
    simulation.run_until(float("inf"))
    return simulation.outcome(arrivals)


class _Simulation:
    def __init__(self, policy: str, model: FleetModel, seed: int) -> None:
        self._policy = policy
        self._model = model
        self._random = Random(seed)  # noqa: S311 - chance that must be repeatable
        host = max(model.host_adapters, model.adapter_slots)
        self._workers = {
            f"{n}": _Worker(f"{n}", role, AdapterMemory(model.adapter_slots, host))
            for n, role in enumerate(model.roles)
        }
        self._has_roles = {*model.roles} != {Role.MIXED}
        self._shares = AdapterShares()
        self._index = KvIndex(10_000_000)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._turns = dict.fromkeys(self._workers, 0)
        self._typical = Typical()
        self._new_tokens = Ewma()
        self._typical_at = 0.0
        self._reused = 0
        self._first: list[float] = []
        self._ends: list[float] = []
        self._gaps: list[float] = []
        self._handoffs = 0
        self._finished_at = 0.0

    def run_until(self, seconds: float) -> None:
        """Handles all events due by a time."""
        while self._events and self._events[0][0] <= seconds:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def _at(self, seconds: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    def arrive(self, arrival: Arrival) -> None:
        """Places an item as a router would."""
        now = arrival.seconds
        self._report(now)
        prefixes = POLICIES[self._policy].looks_at_prefixes
        found = self._index.match(arrival.blocks, now) if prefixes else {}
        most = arrival.prompt_tokens - 1
        adapter = self._need(arrival)
        query = PlacementQuery(
            model=MODEL,
            has_roles=self._has_roles,
            handoff_seconds=self._typical.handoff_seconds,
            adapter=adapter,
            prompt_tokens=arrival.prompt_tokens,
            new_tokens=round(self._typical.new_tokens),
            cached_tokens={a: min(n * arrival.block_tokens, most) for a, n in found.items()},
            prefix=arrival.blocks[0] if prefixes and arrival.blocks else None,
            draw=self._random.getrandbits(32),
        )
        snapshots = [self._snapshot(w) for w in self._workers.values()]
        decision = place_split(self._policy, snapshots, query, self._model.handoff)
        self._shares.add(adapter, query.new_tokens * decision.chosen.step_seconds, now)
        self._start(arrival, decision, now)

    def _start(self, arrival: Arrival, decision: Decision, now: float) -> None:
        """Queues an item where its prompt is computed, and books both legs."""
        adapter = decision.query.adapter
        uncached = arrival.prompt_tokens - decision.cached_tokens
        worker = self._take_turn(decision.prefill, arrival, now)
        item = _Running(arrival, worker.guard.book(uncached, 1, now, adapter), adapter)
        if decision.prefill is not decision.chosen:
            second = self._take_turn(decision.chosen, arrival, now)
            lacking = arrival.prompt_tokens - decision.query.cached_tokens.get(second.address, 0)
            reservation = Reservation(lacking)
            item.decode = _Leg(second, second.guard.book(0, 1, now, adapter, reservation))
            self._fetch_adapter(second, adapter, now)
        self._workers[decision.chosen.address].items += 1
        worker.waiting_tokens += arrival.prompt_tokens
        self._fetch_adapter(worker, adapter, now)
        self._queue(worker, item, now)

    def _take_turn(self, chosen: WorkerSnapshot, arrival: Arrival, now: float) -> _Worker:
        worker = self._workers[chosen.address]
        self._turns[worker.address] = next(self._numbers) + 1
        if POLICIES[self._policy].looks_at_prefixes:
            self._index.expect(worker.address, arrival.blocks, now)
        return worker

    def _need(self, arrival: Arrival) -> AdapterNeed | None:
        if not arrival.adapter:
            return None
        need = named(arrival.adapter, number_of(arrival.adapter), arrival.adapter_rank)
        return replace(need, outlook=self._shares.outlook(need, self._typical))

    def _fetch_adapter(self, worker: _Worker, adapter: AdapterNeed | None, now: float) -> None:
        """Has an adapter delivered that the worker lacks, once for all items."""
        if adapter is None:
            return
        worker.adapters.needed[adapter.key] += 1
        if not worker.adapters.holds(adapter) and adapter.key not in worker.undelivered:
            worker.undelivered[adapter.key] = []
            worker.link_free_at = max(now, worker.link_free_at) + self._model.delivery_seconds
            self._at(worker.link_free_at, partial(self._delivered, worker, adapter))

    def _queue(self, worker: _Worker, item: _Running, now: float) -> None:
        """Submits an item once the worker has the adapter."""
        if item.adapter is None or worker.adapters.holds(item.adapter):
            self._submit(worker, [item], now)
        else:
            worker.undelivered[item.adapter.key].append(item)

    def _delivered(self, worker: _Worker, adapter: AdapterNeed, now: float) -> None:
        worker.adapters.deliver(adapter)
        self._submit(worker, worker.undelivered.pop(adapter.key), now)
        worker.guard.adapters_moved(worker.adapters.held, now)

    def _submit(self, worker: _Worker, items: Sequence[_Running], now: float) -> None:
        # A reservation comes before prompts.
        worker.waiting.extendleft(item for item in items if item.is_computed)
        worker.waiting.extend(item for item in items if not item.is_computed)
        self._admit(worker, now)

    def outcome(self, arrivals: Sequence[Arrival]) -> Outcome:
        workers = self._workers.values()
        return Outcome(
            policy=self._policy,
            items=len(arrivals),
            prompt_tokens=sum(a.prompt_tokens for a in arrivals),
            reused_tokens=self._reused,
            reusable_tokens=_reusable(arrivals),
            items_by_worker=tuple(w.items for w in workers),
            computed_by_worker=tuple(w.computed for w in workers),
            first_token_seconds=tuple(self._first),
            end_seconds=tuple(self._ends),
            gap_seconds=tuple(self._gaps),
            has_roles=self._has_roles,
            handoffs=self._handoffs,
            adapter_items=sum(bool(a.adapter) for a in arrivals),
            adapter_deliveries=sum(w.adapters.deliveries for w in workers),
            adapter_copies=sum(w.adapters.copies for w in workers),
            finished_at=self._finished_at,
        )

    def _snapshot(self, worker: _Worker) -> WorkerSnapshot:
        guard = worker.guard
        return WorkerSnapshot(
            address=worker.address,
            worker=worker.address,
            model=MODEL,
            problem="",
            supported_fields=frozenset(),
            adapters=guard.adapters,
            last_turn=self._turns[worker.address],
            sequences=guard.sequences,
            wait_seconds=guard.wait_seconds(self._typical, self._model.max_batch_size),
            prefill_seconds=guard.prefill_seconds(self._typical),
            step_seconds=guard.step_seconds(self._typical),
            role=worker.role,
            kv=KV,
            decoding_sequences=guard.decoding_sequences,
            transfer_seconds=self._model.kv_token_bytes * guard.byte_seconds(self._typical),
            receiving_tokens=guard.receiving_tokens,
        )

    def _admit(self, worker: _Worker, now: float) -> None:
        """Starts waiting items in order; an item without a slot for the adapter lets others pass."""
        passed: list[_Running] = []
        self._step_until(worker, now)
        while worker.waiting and worker.running < self._model.max_batch_size:
            item = worker.waiting.popleft()
            if (copied_at := self._copy(worker, item, now)) is None:
                passed.append(item)
            elif item.is_computed:
                worker.running += 1
                self._at(copied_at, partial(self._continue, worker, item))
            else:
                self._prefill(worker, item, copied_at)
        worker.waiting.extendleft(reversed(passed))
        self._schedule(worker, now)

    def _copy(self, worker: _Worker, item: _Running, now: float) -> float | None:
        """Time at which the item's adapter is on the device; None while no slot is free."""
        if item.adapter is None:
            return now
        copy = worker.adapters.acquire(item.adapter)
        if copy is None:
            return None
        if not copy:
            return now
        copied_at = now + self._model.copy_seconds
        self._at(copied_at, partial(self._copied, worker))
        return copied_at

    def _copied(self, worker: _Worker, now: float) -> None:
        worker.guard.adapters_moved(worker.adapters.held, now)

    def _prefill(self, worker: _Worker, item: _Running, start: float) -> None:
        worker.waiting_tokens -= item.arrival.prompt_tokens
        worker.running += 1
        reused = self._reuse(worker, item.arrival)
        computed = item.arrival.prompt_tokens - reused
        self._reused += reused
        worker.computed += computed
        item.uncached = computed
        worker.queued_tokens += computed
        self._at(start, partial(self._queue_prompt, worker, item))

    def _queue_prompt(self, worker: _Worker, item: _Running, now: float) -> None:
        yields = self._model.patience if item.decode else 0.0
        order = now + yields * item.uncached * self._token_seconds(worker)
        heapq.heappush(worker.prompts, (order, next(self._numbers), item))
        self._next_prompt(worker, now)

    def _next_prompt(self, worker: _Worker, now: float) -> None:
        if worker.is_prefilling or not worker.prompts:
            return
        _, _, item = heapq.heappop(worker.prompts)
        worker.queued_tokens -= item.uncached
        item.began = now
        self._step_until(worker, now)
        worker.prefill_free_at = now + item.uncached * self._token_seconds(worker)
        worker.is_prefilling = True
        self._schedule(worker, now)
        self._at(worker.prefill_free_at, partial(self._prefilled, worker))
        first = worker.prefill_free_at + self._step(worker)
        self._at(first, partial(self._first_token, worker, item))

    def _prefilled(self, worker: _Worker, now: float) -> None:
        """Without a further prompt, steps are shorter again."""
        self._step_until(worker, now)
        worker.is_prefilling = False
        self._next_prompt(worker, now)
        self._schedule(worker, now)

    def _reuse(self, worker: _Worker, arrival: Arrival) -> int:
        matched = 0
        for block in arrival.blocks:
            if block not in worker.cache:
                break
            matched += 1
        for block in reversed(arrival.blocks[:matched]):
            worker.cache.move_to_end(block)
        return min(matched * arrival.block_tokens, arrival.prompt_tokens - 1)

    def _first_token(self, worker: _Worker, item: _Running, now: float) -> None:
        arrival = item.arrival
        item.booking.started(now)
        item.first = now
        self._first.append(now - arrival.seconds)
        self._store(worker, arrival)
        self._step_until(worker, now)
        if item.decode is None:
            self._decode(worker, item, now)
        else:
            self._hand_over(item, item.decode, now)
            self._leave(worker, item, now)

    def _decode(self, worker: _Worker, item: _Running, now: float) -> None:
        end = worker.steps + max(0, item.arrival.new_tokens - 1)
        heapq.heappush(worker.decoding, (end, next(self._numbers), item))
        self._schedule(worker, now)

    def _hand_over(self, item: _Running, leg: _Leg, now: float) -> None:
        """Moves the KV that the other worker lacks; most of it moved while the prompt was computed."""
        worker, model, arrival = leg.worker, self._model, item.arrival
        self._handoffs += 1
        tokens = arrival.prompt_tokens - self._reuse(worker, arrival)
        seconds = tokens * model.kv_token_bytes / model.kv_bytes_per_second
        begun = max(item.began, worker.received_at)
        worker.received_at = max(begun + seconds, now + LAST_PART * seconds)
        worker.received_bytes += tokens * model.kv_token_bytes
        worker.receiving_seconds += worker.received_at - begun
        moved = replace(item, booking=leg.booking, decode=None, is_computed=True)
        self._at(worker.received_at + model.handoff_seconds, partial(self._queue_at, worker, moved))

    def _queue_at(self, worker: _Worker, item: _Running, now: float) -> None:
        self._queue(worker, item, now)

    def _continue(self, worker: _Worker, item: _Running, now: float) -> None:
        """Decodes an item whose KV has arrived."""
        item.booking.started(now)
        worker.guard.rates.learn_handoff(now - item.first + self._step(worker))
        self._store(worker, item.arrival)
        self._step_until(worker, now)
        self._decode(worker, item, now)

    def _step_until(self, worker: _Worker, now: float) -> None:
        """Counts the steps since the last change of the batch."""
        if worker.running:
            worker.steps += (now - worker.stepped_at) / self._pace(worker)
            worker.busy_seconds += now - worker.stepped_at
        worker.stepped_at = now

    def _schedule(self, worker: _Worker, now: float) -> None:
        """Schedules the next end at the batch's present pace."""
        worker.generation += 1
        if worker.decoding:
            steps = max(0.0, worker.decoding[0][0] - worker.steps)
            ends_at = now + steps * self._pace(worker)
            self._at(ends_at, partial(self._end, worker, worker.generation))

    def _store(self, worker: _Worker, arrival: Arrival) -> None:
        fresh = [block for block in arrival.blocks if block not in worker.cache]
        for block in reversed(fresh):
            worker.cache[block] = arrival.block_tokens
            worker.cached_tokens += arrival.block_tokens
        self._index.store(worker.address, fresh)
        evicted = []
        while worker.cached_tokens > self._model.cache_tokens:
            block, tokens = worker.cache.popitem(last=False)
            worker.cached_tokens -= tokens
            evicted.append(block)
        self._index.remove(worker.address, evicted)

    def _end(self, worker: _Worker, generation: int, now: float) -> None:
        """Ends the next item, unless the batch has changed since this was scheduled."""
        if generation != worker.generation:
            return
        self._step_until(worker, now)
        _, _, item = heapq.heappop(worker.decoding)
        tokens = item.arrival.new_tokens
        self._new_tokens.add(tokens)
        self._ends.append(now - item.arrival.seconds)
        if tokens > 1:
            self._gaps.append((now - item.first) / (tokens - 1))
        self._finished_at = now
        self._leave(worker, item, now)

    def _leave(self, worker: _Worker, item: _Running, now: float) -> None:
        """An item ended on a worker, or moved on."""
        item.booking.leave(now)
        worker.running -= 1
        if item.adapter:
            worker.adapters.release(item.adapter)
            worker.guard.adapters_moved(worker.adapters.held, now)
        self._admit(worker, now)

    def _pace(self, worker: _Worker) -> float:
        """Time between two tokens of a sequence."""
        model, seconds = self._model, self._step(worker)
        if worker.is_prefilling:
            seconds += model.prefill_tokens_per_step / model.prefill_tokens_per_second
        return seconds

    def _token_seconds(self, worker: _Worker) -> float:
        """Time to compute a prompt token, with its share of the step beside it."""
        model = self._model
        share = self._step(worker) / model.prefill_tokens_per_step
        return 1 / model.prefill_tokens_per_second + share

    def _step(self, worker: _Worker) -> float:
        model = self._model
        return (
            model.step_seconds
            + model.step_seconds_per_sequence * worker.running
            + model.step_seconds_per_rank * worker.adapters.rank
        )

    def _report(self, now: float) -> None:
        """Takes the due load reports, and updates the fleet's typical rates."""
        for worker in self._workers.values():
            if now - worker.reported_at >= self._model.report_seconds:
                self._step_until(worker, now)
                worker.reported_at = now
                left = max(0.0, worker.prefill_free_at - now)
                uncomputed = worker.queued_tokens + round(left / self._token_seconds(worker))
                worker.guard.take_report(
                    Report(
                        at=now,
                        busy_seconds=worker.busy_seconds,
                        step_count=int(worker.steps),
                        running_sequences=worker.running,
                        waiting_sequences=len(worker.waiting),
                        pending_prompt_tokens=worker.waiting_tokens + uncomputed,
                        computed_prompt_tokens=worker.computed - uncomputed,
                        adapter_slots=worker.adapters.report,
                        received_bytes=worker.received_bytes,
                        receiving_seconds=worker.receiving_seconds,
                    )
                )
        if now - self._typical_at >= self._model.report_seconds:
            self._typical_at = now
            rates = [worker.guard.rates for worker in self._workers.values()]
            self._typical = typical_of(rates, self._new_tokens.value)
            takers = tuple((w.address, w.adapters.slots) for w in self._workers.values())
            self._shares.settle(takers, self._typical)


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
