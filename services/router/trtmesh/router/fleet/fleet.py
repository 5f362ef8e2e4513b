"""The workers of a router, and the placement of items on them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Collection, Container, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trtmesh.chassis.errors import InvalidField, TrtmeshError
from trtmesh.chassis.vocabulary import Adapter, Lora
from trtmesh.router.adapters.adapters import ItemAdapter
from trtmesh.router.adapters.registry import VersionKey
from trtmesh.router.fleet.plan import Leg, Plan
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.fleet.worker_capabilities import Fingerprints, WorkerCapabilities, cuts_short
from trtmesh.router.kv_index import KvIndex, PromptBlocks
from trtmesh.router.links.replica import ReplicaState
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import (
    POLICIES,
    AdapterNeed,
    KvFacts,
    Phase,
    PlacementQuery,
    Role,
    WorkerSnapshot,
    check_fields,
    check_length,
    longest_sequence,
    place,
    place_split,
)
from trtmesh.router.placement.adapters import takers_of
from trtmesh.router.placement.filters import FULL, has_room, receiver_exclusions
from trtmesh.router.placement.load_guard import Reservation
from trtmesh.router.placement.place import Decision, DecisionLog
from trtmesh.router.placement.rates import Ewma, Rates, Typical, typical_of
from trtmesh.router.placement.settings import HandoffSettings, PlacementSettings
from trtmesh.router.placement.shares import AdapterShares
from trtmesh.router.placement.snapshot import COMPLETED_AT

UNKNOWN = Typical()
"""Rates of a model before its workers have shown any."""

NO_SIZES: frozenset[int] = frozenset()

EXPLAINED_DECISIONS = 4096
"""Latest decisions kept for `trtmesh explain`."""

SETTLE_SECONDS = 1.0
"""Between two looks at the homes of adapters, of which there may be a thousand; their loads fade in 30 s."""

LEAD_SECONDS, ROLL_SECONDS = 1.0, 1800.0
"""A worker that joined so much later than another is younger, and lately if no longer ago than a restart of the whole
fleet takes."""

LONG_TOKENS = 2**14
"""Tokens of a prompt that is hashed only if a worker takes it."""


class Fleet:
    """All workers by address."""

    def __init__(
        self,
        settings: PlacementSettings,
        metrics: RouterMetrics,
        handoff: HandoffSettings,
        configured: Sequence[str] = (),
    ) -> None:
        """`configured` are models named by the settings, the default first."""
        self.configured = configured
        self.policy = settings.policy
        self._handoff = handoff
        self.workers: dict[str, Worker] = {}
        self._snapshots: dict[str, WorkerSnapshot] = {}
        self._snapshot: tuple[WorkerSnapshot, ...] = ()
        self._models: frozenset[str] = frozenset()
        """Models of the snapshots."""
        self._block_sizes: dict[str, frozenset[int]] = {}
        """Block sizes of a model's workers with KV events."""
        self._longest: dict[str, int] = {}
        """Most tokens of a sequence of a model, since a worker changed."""
        self._with_roles: frozenset[str] = frozenset()
        """Models with workers that are not mixed."""
        self.touched: set[str] = set()
        """Addresses of workers with a stale snapshot, since a worker may be replaced at its address."""
        self.loaded: set[str] = set()
        """Addresses of workers with a new load and no other change, several times in an item's life."""
        self.decisions = DecisionLog(EXPLAINED_DECISIONS)
        self.kv_index = KvIndex()
        self._metrics = metrics
        self._turn = 0
        self._typical: dict[str, Typical] = {}
        self._new_tokens = defaultdict[str, Ewma](Ewma)
        self._shares: dict[str, AdapterShares] = {}
        self._settle_at = 0.0
        self._change = asyncio.Event()
        self.lookup_problem = ""
        """Why workers may be missing that are configured, or ''."""

    @property
    def ready(self) -> bool:
        """Whether any worker takes items."""
        return any(worker.ready and not worker.mismatch for worker in self.workers.values())

    def models(self) -> frozenset[str]:
        """Models of all known workers, even lost ones."""
        if self.touched:
            self.snapshot()
        return self._models

    def why_no_models(self) -> str:
        """Why no model is known, with advice."""
        reasons = "; ".join(f"{worker.name}: {worker.unusable}" for worker in self.workers.values())
        if not reasons and self.lookup_problem:
            return f"this router knows no worker: {self.lookup_problem}; try again later"
        if not reasons:
            return (
                "this router knows no worker: none is configured (router.engines), or all were removed; add one with"
                " `trtmesh workers add HOST:PORT`, or try again later"
            )
        return f"no worker that this router knows was ever ready ({reasons}); try again later"

    def set_policy(self, policy: str) -> str:
        """Changes the placement policy; returns the former policy. Raises InvalidField."""
        if policy not in POLICIES:
            raise InvalidField.of("policy", policy, f"one of {', '.join(sorted(POLICIES))}")
        previous, self.policy = self.policy, policy
        return previous

    def join(self, worker: Worker) -> None:
        """Adds a worker, to take items once ready."""
        self.workers[worker.address] = worker
        self.touched.add(worker.address)

    def touch_all(self) -> None:
        """Marks every snapshot as stale: another tokenizer may fit other workers."""
        self.touched.update(self.workers)

    def twin_of(self, worker: Worker, instance: str) -> Worker | None:
        """Another worker of this router in the same process; a link that makes no progress does not count."""
        workers = self.workers.values()
        same = (
            each for each in workers if each is not worker and each.description.instance == instance
        )
        return next((each for each in same if each.works), None) if instance else None

    def forget_leavers(self) -> list[Worker]:
        """Removes and returns idle workers without an address in discovery."""
        gone = [worker for worker in self.workers.values() if worker.leaving and not worker.busy]
        for worker in gone:
            del self.workers[worker.address]
            self.touched.add(worker.address)
        return gone

    def typical(self, model: str) -> Typical:
        """The rates common to the workers of a model."""
        return self._typical.get(model, UNKNOWN)

    def rates(self) -> Mapping[str, Typical]:
        """The same of every model that workers have."""
        return self._typical

    def elders(self, address: str) -> frozenset[str]:
        """The workers that may be restarted after the one at an address, where others were started lately: a rolling
        restart moves each sequence once if it goes to a worker that has its restart behind it."""
        now, leaving = asyncio.get_running_loop().time(), self.workers.get(address)
        since = leaving.since if leaving else now
        ages = {a: w.since - since for a, w in self.workers.items() if w.ready}
        if not any(
            age > LEAD_SECONDS and now - since - age < ROLL_SECONDS for age in ages.values()
        ):
            return frozenset()
        return frozenset(a for a, age in ages.items() if age <= LEAD_SECONDS)

    def snapshot(self) -> tuple[WorkerSnapshot, ...]:
        """Every worker at this moment. Only workers touched since the last call are read again."""
        if self.loaded or self.touched:
            for address in self.loaded - self.touched:
                if (worker := self.workers.get(address)) is not None:
                    typical = self._typical.get(worker.description.model, UNKNOWN)
                    former = self._snapshots[address]
                    self._snapshots[address] = worker.reloaded(former, typical)
            served = [self._read(address) for address in self.touched]
            self.loaded.clear()
            if self.touched:
                self.touched.clear()
                self._longest.clear()
            self._snapshot = tuple(self._snapshots.values())
            if not all(served):
                self._note_served()
        return self._snapshot

    def _note_served(self) -> None:
        served = frozenset(map(_served, self._snapshot))
        self._models = frozenset(model for model, _, _ in served if model)
        with_role = (each for each in served if each[2] is not Role.MIXED)
        self._with_roles = frozenset(model for model, _, _ in with_role)
        sizes: dict[str, set[int]] = {}
        for model, size, _ in served:
            if size:
                sizes.setdefault(model, set()).add(size)
        self._block_sizes = {model: frozenset(each) for model, each in sizes.items()}

    def _read(self, address: str) -> bool:
        """Reads a worker; whether it serves the same as before."""
        former = self._snapshots.get(address)
        if (worker := self.workers.get(address)) is None:
            self._snapshots.pop(address, None)
            return False
        snapshot = worker.snapshot(self.typical(worker.description.model))
        self._snapshots[address] = snapshot
        return former is not None and _served(former) == _served(snapshot)

    def check_fields(self, model: str, fields: frozenset[str]) -> None:
        """Raises UnsupportedField if the model has usable workers and none supports all of `fields`."""
        # Which fields a worker supports does not depend on its load.
        check_fields(self.snapshot() if self.touched else self._snapshot, model, fields)

    def check_length(self, model: str, tokens: int, *, or_more: bool = False) -> None:
        """Raises PromptTooLong if the model has usable workers and none takes so many tokens, `or_more`."""
        check_length(self._longest_sequence(model), model, tokens, or_more=or_more)

    def longest(self, model: str) -> WorkerCapabilities | None:
        """What the usable worker of the model that takes the longest sequences can do; None without one."""
        usable = [
            w.capabilities
            for w in self.workers.values()
            if w.description.model == model and not w.unusable
        ]
        return max(usable, key=lambda able: able.longest_sequence, default=None)

    def most_prompt_tokens(self, model: str) -> int:
        """Most tokens of a prompt that `check_length` allows; 0 without a limit."""
        return max(0, self._longest_sequence(model) - 1)

    def _longest_sequence(self, model: str) -> int:
        """Most tokens of a sequence on any usable worker of the model; 0 without one."""
        if self.touched:
            self.snapshot()
        longest = self._longest.get(model)
        if longest is None:
            longest = self._longest[model] = longest_sequence(self._snapshot, model)
        return longest

    def place(self, query: PlacementQuery, blocks: PromptBlocks) -> Plan:
        """Books a worker for an item, or two. Raises as `placement.place`."""
        # The loop's own clock stands still within a pass.
        begun, now = time.perf_counter(), asyncio.get_running_loop().time()
        fleet = self.snapshot()
        query = self._completed(query, blocks, now)
        decision = place_split(self.policy, fleet, query, self._handoff)
        plan = self._book(decision, blocks, now)
        if self._shares:
            self._count_share(decision, now)
        self._metrics.placement.observe(time.perf_counter() - begun)
        return plan

    def place_receiver(self, query: PlacementQuery, blocks: PromptBlocks, kv: KvFacts) -> Leg:
        """Books a worker to continue a sequence from `kv` of another. Raises as `place`."""
        fleet, now = self.snapshot(), asyncio.get_running_loop().time()
        query = self._completed(query, blocks, now)._replace(phase=Phase.DECODE)
        query = query._replace(exclude=receiver_exclusions(fleet, query, kv))
        decision = place(self.policy, fleet, query)
        return self._book_decode(decision, blocks, now)

    def promise(self, query: PlacementQuery, blocks: PromptBlocks) -> Leg | None:
        """Books a worker with room for an item that leaves. Returns None without such a worker."""
        fleet, now = self.snapshot(), asyncio.get_running_loop().time()
        full = {worker.address: FULL for worker in fleet if not has_room(worker, query)}
        query = self._completed(query._replace(exclude={**query.exclude, **full}), blocks, now)
        try:
            decision = place(self.policy, fleet, query)
        except TrtmeshError:
            return None
        worker = self.workers[decision.chosen.address]
        uncached = query.prompt_tokens - decision.cached_tokens
        booking = worker.guard.book(uncached, query.sequences, now, query.adapter)
        return Leg(worker, booking, decision)

    def reported_adapter(
        self, model: str, asked: Lora, removed: Container[VersionKey] = ()
    ) -> ItemAdapter | None:
        """An adapter by number, version and name, as a worker reports it, but none of the `removed` versions."""
        name = asked.name or "" if asked.id is None else asked.id
        for worker in self.snapshot():
            if worker.model == model:
                for key in worker.adapters.named.get(name, ()):
                    residency = worker.adapters.held[key]
                    if key not in removed and _names(asked, residency.adapter):
                        return ItemAdapter(residency.adapter, rank=residency.rank)
        return None

    async def try_adapter(self, model: str, adapter: ItemAdapter) -> None:
        """Has a ready worker of a model, '' for any, load a version, if one can load any now. Raises the worker's
        error."""
        takers = [
            worker
            for worker in self.workers.values()
            if worker.ready and worker.takes_adapters and model in ("", worker.description.model)
        ]
        for worker in sorted(takers, key=lambda worker: worker.guard.sequences):
            try:
                await worker.hold(adapter)
            except TrtmeshError as error:
                if not error.row.movable:
                    raise
            else:
                return

    def block_hashes(self, model: str, blocks: PromptBlocks) -> list[int]:
        """Names of a prompt's blocks on the model's workers; empty if the policy ignores prefixes."""
        return blocks.hashes(min(self._block_sizes_of(model, blocks), default=0))

    def has_blocks(self, hashes: Sequence[int]) -> bool:
        """Whether any worker holds all the blocks."""
        found = self.kv_index.match(hashes, asyncio.get_running_loop().time())
        return len(hashes) in found.values()

    def _book(self, decision: Decision, blocks: PromptBlocks, now: float) -> Plan:
        """The legs of a decision, which count as load of their workers from now on."""
        query, prefilling = decision.query, decision.prefill
        uncached = query.prompt_tokens - query.cached_tokens.get(prefilling.address, 0)
        worker = self._take_turn(prefilling, blocks, now)
        booking = worker.guard.book(uncached, query.sequences, now, query.adapter)
        if prefilling is decision.chosen:
            leg = Leg(worker, booking, decision)
            return Plan(leg, leg)
        return Plan(Leg(worker, booking, decision), self._book_decode(decision, blocks, now))

    def _book_decode(self, decision: Decision, blocks: PromptBlocks, now: float) -> Leg:
        """The leg of a sequence that continues from another worker's KV."""
        worker, query = self._take_turn(decision.chosen, blocks, now), decision.query
        size = worker.capabilities.tokens_per_block
        lacking = query.prompt_tokens - query.cached_tokens.get(worker.address, 0)
        count = -(-(query.prompt_tokens + query.new_tokens) // size) if size else 0
        reservation = Reservation(lacking, count)
        booking = worker.guard.book(0, query.sequences, now, query.adapter, reservation)
        return Leg(worker, booking, decision)

    def _take_turn(self, chosen: WorkerSnapshot, blocks: PromptBlocks, now: float) -> Worker:
        """The chosen worker, which will hold the prompt's KV."""
        worker = self.workers[chosen.address]
        self._turn += 1
        worker.last_turn = self._turn
        if POLICIES[self.policy].looks_at_prefixes:
            hashes = blocks.hashes(worker.capabilities.tokens_per_block)
            self.kv_index.expect(worker.address, hashes, now)
        self._metrics.note_placement(self.policy, chosen.worker, self._names)
        return worker

    def _names(self) -> Iterable[str]:
        return (each.name for each in self.workers.values())

    def _count_share(self, decision: Decision, now: float) -> None:
        """Counts an item in the shares of adapters, once its model has any."""
        query, worker = decision.query, decision.chosen
        if shares := self._shares.get(query.model):
            shares.add(query.adapter, query.new_tokens * worker.step_seconds, now)

    def _completed(self, query: PlacementQuery, blocks: PromptBlocks, now: float) -> PlacementQuery:
        """The query with the fleet's knowledge added."""
        typical = self.typical(query.model)
        new_tokens = min(typical.new_tokens, query.max_tokens or typical.new_tokens)
        sizes = self._block_sizes_of(query.model, blocks)
        known = (
            query.adapter and self._seen(query.adapter, query.model, typical),
            query.model in self._with_roles,
            typical.handoff_seconds,
            round(new_tokens * query.sequences),
            self._cached_tokens(query, blocks, sizes, now),
            next(iter(blocks.hashes(min(sizes, default=0))), None),
            random.getrandbits(32),
        )
        return PlacementQuery._make((*query[:COMPLETED_AT], *known))

    def _seen(self, need: AdapterNeed, model: str, typical: Typical) -> AdapterNeed:
        """Returns the adapter with the rank, as reported by workers, and with the fleet's experience."""
        holders = (worker.adapters.held.get(need.key) for worker in self.snapshot())
        rank = need.rank or max((held.rank for held in holders if held), default=0)
        shares = self._shares.setdefault(model, AdapterShares())
        need = need if need.rank else replace(need, rank=rank)
        return replace(need, outlook=shares.outlook(need, typical))

    def _block_sizes_of(self, model: str, blocks: PromptBlocks) -> frozenset[int]:
        """Block sizes of the model's workers with KV events; empty if the policy ignores prefixes, and for a prompt
        too long for all workers: to hash a million tokens takes 130 ms."""
        if not POLICIES[self.policy].looks_at_prefixes:
            return NO_SIZES
        if self.touched:
            self.snapshot()
        tokens = blocks.prompt_tokens
        if tokens >= LONG_TOKENS and not any(
            worker.model == model and tokens < worker.max_sequence_tokens
            for worker in self.snapshot()
        ):
            return NO_SIZES
        return self._block_sizes.get(model, NO_SIZES)

    def _cached_tokens(
        self, query: PlacementQuery, blocks: PromptBlocks, sizes: Collection[int], now: float
    ) -> dict[str, int]:
        """Prompt tokens with reusable KV on each worker."""
        # The last token is always computed, for the logits.
        most = query.prompt_tokens - 1
        cached = {}
        for size in sizes:
            for address, count in self.kv_index.match(blocks.hashes(size), now).items():
                if len(sizes) == 1 or self._snapshots[address].tokens_per_block == size:
                    cached[address] = min(count * size, most)
        return cached

    def learn_new_tokens(self, model: str, tokens: float) -> None:
        """Learns the length of a model's outputs from an item of `tokens` tokens per sequence."""
        self._new_tokens[model].add(tokens)

    def refresh(self) -> None:
        """Updates everything time-dependent: slow starts, breakers and the models' typical rates."""
        models = self.models()
        for gone in self._new_tokens.keys() - models:
            del self._new_tokens[gone]
        for gone in self._shares.keys() - models:
            del self._shares[gone]
        self._typical = self._typical_now(models)
        if (now := asyncio.get_running_loop().time()) >= self._settle_at:
            self._settle_at = now + SETTLE_SECONDS
            for model, shares in self._shares.items():
                shares.settle(takers_of(self.snapshot(), model), self._typical[model])
        self.loaded.update(self.workers)

    def _typical_now(self, models: Iterable[str]) -> dict[str, Typical]:
        rates: dict[str, list[Rates]] = {model: [] for model in models}
        for worker in self.workers.values():
            rates.setdefault(worker.description.model, []).append(worker.guard.rates)
        learned = self._new_tokens
        return {
            model: typical_of(rates[model], learned[model].value if model in learned else None)
            for model in models
        }

    def may_recover(self, model: str) -> bool:
        """Whether any worker may become ready without an operator, or join: the settings say who serves `model`."""
        return model in self.configured or any(
            worker.state is not ReplicaState.REFUSED and not worker.mismatch
            for worker in self.workers.values()
        )

    def others_than(self, identity: Fingerprints) -> Collection[str]:
        """Addresses of workers with another model or tokenizer."""
        return [a for a, worker in self.workers.items() if worker.capabilities.identity != identity]

    def shorter_than(self, worker: Worker, tokens: int) -> dict[str, str]:
        """The workers that would cut short a sequence of `worker` of up to `tokens`, its prompt included, and why."""
        return {
            address: f"it ends sequences at {other.capabilities.longest_sequence} tokens"
            for address, other in self.workers.items()
            if cuts_short(
                other.capabilities.longest_sequence, worker.capabilities.longest_sequence, tokens
            )
        }

    def changed(self) -> None:
        """A worker may take items now: wakes waiting items and retries failed moves."""
        self._change.set()
        self._change = asyncio.Event()
        for worker in self.workers.values():
            worker.retry_migrations()

    def change(self, seconds: float) -> Coroutine[Any, Any, None]:
        """Waits at most `seconds` for the next change after this call, even if it comes before the wait begins."""
        return _set_within(self._change, seconds)


def _served(worker: WorkerSnapshot) -> tuple[str, int, Role]:
    """Model, block size and role: few values in a fleet, and they seldom change."""
    return worker.model, worker.tokens_per_block, worker.role


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _names(asked: Lora, adapter: Adapter) -> bool:
    """Whether a request names an adapter: everything set in the request is equal."""
    given = ((asked.id, adapter.id), (asked.version, adapter.version))
    if any(wanted not in (None, known) for wanted, known in given):
        return False
    # A number names an adapter alone: clients choose names freely.
    return asked.id is not None or (asked.name or "") == adapter.name != ""
