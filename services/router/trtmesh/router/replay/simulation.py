"""A simulated fleet: the result of a recorded trace under a policy.

Placement is the router's own code: load guard, KV index, learned rates and `place`. A worker is a model of an engine:

* prompts prefill in sequence at a fixed rate, cached tokens at no cost;
* sequences decode side by side, a token per step; steps grow with the number of sequences and with the largest rank of
  their adapters;
* the cache evicts least recently used blocks;
* adapters are delivered one after another to host memory, and copied to a slot on the device before an item runs;
* load reports come at a fixed interval.

Left out: longer steps during chunked prefill, siblings, slow start, the breaker, admission limits, every sequence of an
item but the first, and lost or unequal workers.
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
from trtmesh.router.placement import POLICIES, AdapterNeed, PlacementQuery, WorkerSnapshot, place
from trtmesh.router.placement.load_guard import Booking, LoadGuard
from trtmesh.router.placement.rates import Ewma, Report, Typical, typical_of
from trtmesh.router.placement.residency import AdapterKey
from trtmesh.router.placement.shares import AdapterShares
from trtmesh.router.replay.adapter_memory import AdapterMemory, named
from trtmesh.router.replay.trace import Arrival

MODEL = "replayed"


@dataclass(frozen=True, slots=True)
class FleetModel:
    """The simulated fleet; all workers are equal."""

    workers: int = 4
    prefill_tokens_per_second: float = 8000.0
    step_seconds: float = 0.010
    step_seconds_per_sequence: float = 0.00035
    cache_tokens: int = 500_000
    max_batch_size: int = 256
    report_seconds: float = 0.1
    adapter_slots: int = 16
    """Adapters on the device of a worker."""
    host_adapters: int = 64
    """Adapters in the memory of a worker, those on the device included."""
    delivery_seconds: float = 0.5
    """Time of an adapter from the router to host memory."""
    copy_seconds: float = 0.02
    """Time of an adapter from host memory to the device."""
    step_seconds_per_rank: float = 0.00004


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a trace under a policy. Times are seconds from an item's arrival."""

    policy: str
    items: int
    prompt_tokens: int
    reused_tokens: int
    reusable_tokens: int
    """Tokens reused by an unbounded cache for the whole fleet."""
    items_by_worker: tuple[int, ...]
    computed_by_worker: tuple[int, ...]
    first_token_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]
    adapter_items: int
    """Items with an adapter."""
    adapter_deliveries: int
    adapter_copies: int
    finished_at: float
    """Time of the last end from the start of the trace."""

    @property
    def hit_rate(self) -> float:
        """Reused share of the prompt tokens."""
        return self.reused_tokens / self.prompt_tokens

    @property
    def balance(self) -> float:
        """Prompt tokens computed by the busiest worker, relative to the mean; 1 is even."""
        return (
            max(self.computed_by_worker)
            * len(self.computed_by_worker)
            / max(1, sum(self.computed_by_worker))
        )


@dataclass(slots=True)
class _Running:
    arrival: Arrival
    booking: Booking
    adapter: AdapterNeed | None


@dataclass(slots=True)
class _Worker:
    address: str
    adapters: AdapterMemory
    guard: LoadGuard = field(default_factory=lambda: LoadGuard(lambda: None))
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    cached_tokens: int = 0
    waiting: deque[_Running] = field(default_factory=deque)
    running: int = 0
    prefill_free_at: float = 0.0
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
        memories = [
            AdapterMemory(model.adapter_slots, max(model.host_adapters, model.adapter_slots))
            for _ in range(model.workers)
        ]
        self._workers = {f"{n}": _Worker(f"{n}", memory) for n, memory in enumerate(memories)}
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
            adapter=adapter,
            prompt_tokens=arrival.prompt_tokens,
            new_tokens=round(self._typical.new_tokens),
            cached_tokens={a: min(n * arrival.block_tokens, most) for a, n in found.items()},
            prefix=arrival.blocks[0] if prefixes and arrival.blocks else None,
            draw=self._random.getrandbits(32),
        )
        decision = place(self._policy, [self._snapshot(w) for w in self._workers.values()], query)
        worker = self._workers[decision.chosen.address]
        self._turns[worker.address] = next(self._numbers) + 1
        uncached = arrival.prompt_tokens - decision.cached_tokens
        booking = worker.guard.book(uncached, 1, now, adapter)
        self._shares.add(adapter, query.new_tokens * decision.chosen.step_seconds, now)
        if prefixes:
            self._index.expect(worker.address, arrival.blocks, now)
        worker.items += 1
        worker.waiting_tokens += arrival.prompt_tokens
        self._queue(worker, _Running(arrival, booking, adapter), now)

    def _need(self, arrival: Arrival) -> AdapterNeed | None:
        if not arrival.adapter:
            return None
        need = named(arrival.adapter, number_of(arrival.adapter), arrival.adapter_rank)
        return replace(need, outlook=self._shares.outlook(need, self._typical))

    def _queue(self, worker: _Worker, item: _Running, now: float) -> None:
        """Submits an item once the worker has the adapter, which is delivered once for all items."""
        if item.adapter:
            worker.adapters.needed[item.adapter.key] += 1
        if item.adapter is None or worker.adapters.holds(item.adapter):
            self._submit(worker, [item], now)
            return
        key = item.adapter.key
        if key not in worker.undelivered:
            worker.undelivered[key] = []
            worker.link_free_at = max(now, worker.link_free_at) + self._model.delivery_seconds
            self._at(worker.link_free_at, partial(self._delivered, worker, item.adapter))
        worker.undelivered[key].append(item)

    def _delivered(self, worker: _Worker, adapter: AdapterNeed, now: float) -> None:
        worker.adapters.deliver(adapter)
        self._submit(worker, worker.undelivered.pop(adapter.key), now)
        worker.guard.adapters_moved(worker.adapters.held, now)

    def _submit(self, worker: _Worker, items: Sequence[_Running], now: float) -> None:
        worker.waiting.extend(items)
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
        )

    def _admit(self, worker: _Worker, now: float) -> None:
        """Starts waiting items in order; an item without a slot for the adapter lets others pass."""
        passed: list[_Running] = []
        self._step_until(worker, now)
        while worker.waiting and worker.running < self._model.max_batch_size:
            item = worker.waiting.popleft()
            if (copied_at := self._copy(worker, item, now)) is None:
                passed.append(item)
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
        start = max(start, worker.prefill_free_at)
        worker.prefill_free_at = start + computed / self._model.prefill_tokens_per_second
        first = worker.prefill_free_at + self._step(worker)
        self._at(first, partial(self._first_token, worker, item))

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
        self._first.append(now - arrival.seconds)
        self._store(worker, arrival)
        self._step_until(worker, now)
        end = worker.steps + max(0, arrival.new_tokens - 1)
        heapq.heappush(worker.decoding, (end, next(self._numbers), item))
        self._schedule(worker, now)

    def _step_until(self, worker: _Worker, now: float) -> None:
        """Counts the steps since the last change of the batch."""
        if worker.running:
            worker.steps += (now - worker.stepped_at) / self._step(worker)
            worker.busy_seconds += now - worker.stepped_at
        worker.stepped_at = now

    def _schedule(self, worker: _Worker, now: float) -> None:
        """Schedules the next end at the batch's present pace."""
        worker.generation += 1
        if worker.decoding:
            steps = max(0.0, worker.decoding[0][0] - worker.steps)
            ends_at = now + steps * self._step(worker)
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
        item.booking.leave(now)
        worker.running -= 1
        if item.adapter:
            worker.adapters.release(item.adapter)
            worker.guard.adapters_moved(worker.adapters.held, now)
        self._new_tokens.add(item.arrival.new_tokens)
        self._ends.append(now - item.arrival.seconds)
        self._finished_at = now
        self._admit(worker, now)

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
                rate = self._model.prefill_tokens_per_second
                uncomputed = round(max(0.0, worker.prefill_free_at - now) * rate)
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
