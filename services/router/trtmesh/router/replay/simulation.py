"""A simulated fleet: the result of a recorded trace under a policy.

Placement is the router's own code: load guard, KV index, learned rates and `place`. A worker is a model of an engine:

* prompts prefill in sequence at a fixed rate, cached tokens at no cost;
* sequences decode side by side, a token per step; steps grow with the number of sequences;
* the cache evicts least recently used blocks;
* load reports come at a fixed interval.

Left out: longer steps during chunked prefill, siblings, slow start, the breaker, admission limits, every sequence of an
item but the first, and lost or unequal workers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from trtmesh.router.kv_index import KvIndex
from trtmesh.router.placement import POLICIES, PlacementQuery, WorkerSnapshot, place
from trtmesh.router.placement.load_guard import Booking, LoadGuard
from trtmesh.router.placement.rates import Ewma, Report, Typical, typical_of
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


@dataclass(slots=True)
class _Worker:
    address: str
    guard: LoadGuard = field(default_factory=lambda: LoadGuard(lambda: None))
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    cached_tokens: int = 0
    waiting: deque[_Running] = field(default_factory=deque)
    running: int = 0
    prefill_free_at: float = 0.0
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
        self._workers = {f"{n}": _Worker(f"{n}") for n in range(model.workers)}
        self._index = KvIndex(10_000_000)
        self._events: list[tuple[float, int, str, _Worker, _Running]] = []
        self._numbers = count()
        self._turns = dict.fromkeys(self._workers, 0)
        self._typical = Typical()
        self._new_tokens = Ewma()
        self._typical_at = 0.0
        self._reused = 0
        self._first: list[float] = []
        self._ends: list[float] = []

    def run_until(self, seconds: float) -> None:
        """Handles all events due by a time."""
        while self._events and self._events[0][0] <= seconds:
            now, _, kind, worker, item = heapq.heappop(self._events)
            if kind == "first":
                self._first_token(worker, item, now)
            else:
                self._end(worker, item, now)

    def arrive(self, arrival: Arrival) -> None:
        """Places an item as a router would."""
        now = arrival.seconds
        self._report(now)
        prefixes = POLICIES[self._policy].looks_at_prefixes
        found = self._index.match(arrival.blocks, now) if prefixes else {}
        most = arrival.prompt_tokens - 1
        query = PlacementQuery(
            model=MODEL,
            prompt_tokens=arrival.prompt_tokens,
            new_tokens=round(self._typical.new_tokens),
            cached_tokens={a: min(n * arrival.block_tokens, most) for a, n in found.items()},
            prefix=arrival.blocks[0] if prefixes and arrival.blocks else None,
            draw=self._random.getrandbits(32),
        )
        decision = place(self._policy, [self._snapshot(w) for w in self._workers.values()], query)
        worker = self._workers[decision.chosen.address]
        self._turns[worker.address] = next(self._numbers) + 1
        booking = worker.guard.book(arrival.prompt_tokens - decision.cached_tokens, 1, now)
        if prefixes:
            self._index.expect(worker.address, arrival.blocks, now)
        worker.items += 1
        worker.waiting_tokens += arrival.prompt_tokens
        worker.waiting.append(_Running(arrival, booking))
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
        )

    def _snapshot(self, worker: _Worker) -> WorkerSnapshot:
        guard = worker.guard
        return WorkerSnapshot(
            address=worker.address,
            worker=worker.address,
            model=MODEL,
            problem="",
            supported_fields=frozenset(),
            last_turn=self._turns[worker.address],
            sequences=guard.sequences,
            wait_seconds=guard.wait_seconds(self._typical, self._model.max_batch_size),
            prefill_seconds=guard.prefill_seconds(self._typical),
            step_seconds=guard.step_seconds(self._typical),
        )

    def _admit(self, worker: _Worker, now: float) -> None:
        while worker.waiting and worker.running < self._model.max_batch_size:
            item = worker.waiting.popleft()
            worker.waiting_tokens -= item.arrival.prompt_tokens
            worker.running += 1
            reused = self._reuse(worker, item.arrival)
            computed = item.arrival.prompt_tokens - reused
            self._reused += reused
            worker.computed += computed
            start = max(now, worker.prefill_free_at)
            worker.prefill_free_at = start + computed / self._model.prefill_tokens_per_second
            first = worker.prefill_free_at + self._step(worker)
            heapq.heappush(self._events, (first, next(self._numbers), "first", worker, item))

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
        seconds = max(0, arrival.new_tokens - 1) * self._step(worker)
        heapq.heappush(self._events, (now + seconds, next(self._numbers), "end", worker, item))

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

    def _end(self, worker: _Worker, item: _Running, now: float) -> None:
        item.booking.leave(now)
        worker.running -= 1
        self._new_tokens.add(item.arrival.new_tokens)
        self._ends.append(now - item.arrival.seconds)
        self._admit(worker, now)

    def _step(self, worker: _Worker) -> float:
        model = self._model
        return model.step_seconds + model.step_seconds_per_sequence * worker.running

    def _report(self, now: float) -> None:
        """Takes the due load reports, and updates the fleet's typical rates."""
        for worker in self._workers.values():
            if now - worker.reported_at >= self._model.report_seconds:
                if worker.running:
                    worker.steps += (now - worker.reported_at) / self._step(worker)
                    worker.busy_seconds += now - worker.reported_at
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
                    )
                )
        if now - self._typical_at >= self._model.report_seconds:
            self._typical_at = now
            rates = [worker.guard.rates for worker in self._workers.values()]
            self._typical = typical_of(rates, self._new_tokens.value)


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
