"""The workers that a router knows, and the one way to get a place on one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from trtmesh.chassis.errors import InvalidField, NoWorker, UnsupportedField
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.kv_index import KvIndex, PromptBlocks
from trtmesh.router.links.replica import ReplicaState
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import (
    POLICIES,
    PlacementQuery,
    WorkerSnapshot,
    check_fields,
    place,
)
from trtmesh.router.placement.decision_log import DecisionLog, DecisionRecord
from trtmesh.router.placement.load_guard import Booking
from trtmesh.router.placement.rates import Ewma, Typical, typical_of
from trtmesh.router.requests.siblings import LEAST_SHARED_BLOCKS, Seat, Siblings

UNKNOWN = Typical()
"""Of a model of whose workers nothing was learned."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What two workers must share so that one goes on where the other stopped; '' is what a worker does not tell."""

    model_fingerprint: str
    tokenizer_fingerprint: str

    @classmethod
    def of(cls, worker: Worker) -> Identity:
        return cls(worker.engine.model_fingerprint, worker.engine.tokenizer_fingerprint)

    def fits(self, other: Identity) -> bool:
        return _equal(self.model_fingerprint, other.model_fingerprint) and _equal(
            self.tokenizer_fingerprint, other.tokenizer_fingerprint
        )


def _equal(one: str, other: str) -> bool:
    return not one or not other or one == other


@dataclass(frozen=True, slots=True)
class ItemToPlace:
    """An item, or what is left of it, that needs a worker.

    `prompt_tokens` counts what was generated before too; `exclude` holds addresses of workers that must not take
    it, and why; `cause` is first, retry or migration.
    """

    request_id: str
    batch_index: int
    model: str
    fields: frozenset[str]
    prompt_tokens: int
    blocks: PromptBlocks
    sequences: int = 1
    max_tokens: int | None = None
    exclude: Mapping[str, str] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    prefer: str = ""
    cause: str = "first"


@dataclass(slots=True)
class Placed:
    """A place on a worker. The sequences that are dispatched while inside keep it; an error gives it back."""

    worker: Worker
    booking: Booking
    record: DecisionRecord

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.booking.release(asyncio.get_running_loop().time())


class Fleet:
    """All workers by address."""

    def __init__(
        self, policy: str, metrics: RouterMetrics, decisions: DecisionLog, kv_index: KvIndex
    ) -> None:
        self.policy = policy
        self.workers: dict[str, Worker] = {}
        self._snapshots: dict[str, WorkerSnapshot] = {}
        self._snapshot: tuple[WorkerSnapshot, ...] = ()
        self._touched: set[str] = set()
        """Addresses, because one worker may have left there and another joined since the last placement."""
        self.decisions = decisions
        self.kv_index = kv_index
        self._metrics = metrics
        self._turn = 0
        self._typical: dict[str, Typical] = {}
        self._new_tokens: dict[str, Ewma] = {}
        self._change = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether any worker takes items."""
        return any(worker.ready and not worker.mismatch for worker in self.workers.values())

    def models(self) -> frozenset[str]:
        """Models that the workers serve or, as long as the router knows them, served."""
        return frozenset(
            worker.engine.model for worker in self.workers.values() if worker.engine.model
        )

    def why_no_models(self) -> str:
        """Why no model is known, and what to do about it."""
        reasons = "; ".join(f"{worker.name}: {worker.unusable}" for worker in self.workers.values())
        if not reasons:
            return (
                "this router knows no worker: none is configured (router.engines), or all were removed; add one with"
                " `trtmesh workers add HOST:PORT`, or try again later"
            )
        return f"no worker that this router knows was ever ready ({reasons}); try again later"

    def set_policy(self, policy: str) -> str:
        """Changes how workers are chosen from now on; the policy until now. Raises InvalidField."""
        if policy not in POLICIES:
            raise InvalidField.of("policy", policy, f"one of {', '.join(sorted(POLICIES))}")
        previous, self.policy = self.policy, policy
        return previous

    def join(self, worker: Worker) -> None:
        """A worker that may be placed on as soon as it is ready."""
        self.workers[worker.address] = worker
        self.touch(worker)

    def forget_leavers(self) -> list[Worker]:
        """Lets go of workers whose address is gone and that have nothing left; gives them."""
        gone = [worker for worker in self.workers.values() if worker.leaving and not worker.busy]
        for worker in gone:
            del self.workers[worker.address]
            self.touch(worker)
        return gone

    def touch(self, worker: Worker) -> None:
        """Something about a worker changed that a placement needs to know."""
        self._touched.add(worker.address)

    def snapshot(self) -> tuple[WorkerSnapshot, ...]:
        """Every worker as it is now. Between two placements few workers change, and only these are looked at again."""
        if self._touched:
            for address in self._touched:
                if (worker := self.workers.get(address)) is None:
                    self._snapshots.pop(address, None)
                else:
                    typical = self._typical.get(worker.engine.model, UNKNOWN)
                    self._snapshots[address] = worker.snapshot(typical)
            self._touched.clear()
            self._snapshot = tuple(self._snapshots.values())
        return self._snapshot

    def check_fields(self, model: str, fields: frozenset[str]) -> None:
        """Raises UnsupportedField where no worker of the model that is ready acts on all of `fields`."""
        check_fields(self.snapshot(), PlacementQuery(model, fields))

    def place(self, item: ItemToPlace) -> Placed:
        """A place for an item; it counts as work of its worker from now on. Raises NoWorker or UnsupportedField."""
        # The loop's own clock stands still within a pass.
        begun, started = time.perf_counter(), asyncio.get_running_loop().time()
        fleet = self.snapshot()
        decision = place(self.policy, fleet, self._query(item, fleet, started))
        worker = self.workers[decision.chosen.address]
        self._turn += 1
        worker.last_turn = self._turn
        uncached = item.prompt_tokens - decision.cached_tokens
        booking = worker.guard.book(uncached, item.sequences, started)
        if POLICIES[self.policy].looks_at_prefixes:
            hashes = item.blocks.hashes(worker.engine.tokens_per_block)
            self.kv_index.expect(worker.address, hashes, started)
        record = DecisionRecord(item.request_id, item.batch_index, item.cause, decision)
        self.decisions.add(record)
        self._metrics.placed[self.policy, worker.name] += 1
        self._metrics.placement.observe(time.perf_counter() - begun)
        return Placed(worker, booking, record)

    def has_place(self, item: ItemToPlace) -> bool:
        """Whether a worker would take an item now."""
        fleet, now = self.snapshot(), asyncio.get_running_loop().time()
        try:
            place(self.policy, fleet, self._query(item, fleet, now))
        except (NoWorker, UnsupportedField):
            return False
        return True

    def _query(
        self, item: ItemToPlace, fleet: Sequence[WorkerSnapshot], now: float
    ) -> PlacementQuery:
        typical = self._typical.get(item.model, UNKNOWN)
        new_tokens = min(typical.new_tokens, item.max_tokens or typical.new_tokens)
        sizes = self._block_sizes(item.model, fleet)
        return PlacementQuery(
            model=item.model,
            fields=item.fields,
            prompt_tokens=item.prompt_tokens,
            cached_tokens=self._cached_tokens(item, sizes, now),
            prefix=next(iter(item.blocks.hashes(min(sizes, default=0))), None),
            new_tokens=round(new_tokens * item.sequences),
            exclude=item.exclude,
            avoid=item.avoid,
            prefer=item.prefer,
            draw=random.getrandbits(32),
        )

    def seat(self, siblings: Siblings, model: str, blocks: PromptBlocks) -> Seat | None:
        """An item's place among those that begin alike; None where the policy does not look at prefixes, where nothing
        is shared and where a worker has it already."""
        if not POLICIES[self.policy].looks_at_prefixes:
            return None
        sizes = {worker.tokens_per_block for worker in self.snapshot() if worker.model == model}
        hashes = blocks.hashes(min(sizes, default=0))
        if (seat := siblings.find(hashes)) is not None:
            return seat
        now = asyncio.get_running_loop().time()
        found = self.kv_index.match(hashes[:LEAST_SHARED_BLOCKS], now)
        if LEAST_SHARED_BLOCKS in found.values():
            return None
        return siblings.lead(hashes)

    def _block_sizes(self, model: str, fleet: Sequence[WorkerSnapshot]) -> set[int]:
        """Tokens of a block on the workers that tell of theirs; none where the policy does not care."""
        if not POLICIES[self.policy].looks_at_prefixes:
            return set()
        return {worker.tokens_per_block for worker in fleet if worker.model == model} - {0}

    def _cached_tokens(self, item: ItemToPlace, sizes: set[int], now: float) -> dict[str, int]:
        """Prompt tokens whose KV each worker has."""
        most = item.prompt_tokens - 1
        cached = {}
        for size in sizes:
            for address, blocks in self.kv_index.match(item.blocks.hashes(size), now).items():
                if len(sizes) == 1 or self._snapshots[address].tokens_per_block == size:
                    # The last token is always computed, for its logits.
                    cached[address] = min(blocks * size, most)
        return cached

    def learn_new_tokens(self, model: str, tokens: float) -> None:
        """An item generated so many tokens a sequence."""
        self._new_tokens.setdefault(model, Ewma()).add(tokens)

    def refresh(self) -> None:
        """Brings up to date what changes with time: slow starts, breakers, what is typical of a model."""
        models = self.models()
        for gone in self._new_tokens.keys() - models:
            del self._new_tokens[gone]
        self._typical = {model: self._typical_of(model) for model in models}
        for worker in self.workers.values():
            worker.touch()

    def _typical_of(self, model: str) -> Typical:
        rates = [w.guard.rates for w in self.workers.values() if w.engine.model == model]
        learned = self._new_tokens.get(model)
        return typical_of(rates, learned.value if learned else None)

    @property
    def hopeful(self) -> bool:
        """Whether waiting for a worker makes sense: some may become ready without anybody's doing."""
        return any(
            w.state is not ReplicaState.REFUSED and not w.mismatch for w in self.workers.values()
        )

    def others_than(self, identity: Identity) -> Collection[str]:
        """Addresses of workers that would not go on as a worker of `identity` does."""
        return [a for a, worker in self.workers.items() if not identity.fits(Identity.of(worker))]

    def changed(self) -> None:
        """A worker may take now what none took before."""
        self._change.set()
        self._change = asyncio.Event()
        for worker in self.workers.values():
            worker.move_on()

    async def change(self, seconds: float) -> None:
        """Returns when something changed, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change.wait()
