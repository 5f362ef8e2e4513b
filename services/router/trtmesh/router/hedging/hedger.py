"""Looks for late sequences, and starts a second copy of each within the budget."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest

from trtmesh.chassis.tasks import next_tick
from trtmesh.router.fleet.assignments import Held
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.hedging.lateness import (
    LEAST_STEP_MARGIN,
    Budget,
    Cause,
    Obstacle,
    Peer,
    Seen,
    StepPace,
    Wastes,
    copy_price,
    first_margin,
    is_slow,
    least,
    obstacles,
    step_margin,
    text,
)
from trtmesh.router.hedging.race import HedgedItem, HedgeRecord, Race
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import WorkerSnapshot
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

TICK_SECONDS = 0.02
LEARN_SECONDS = 0.25
"""Between two looks at what was seen: a percentile costs more than a tick."""
DEFECT_SECONDS = 1.0
"""Pause after a look that failed."""
MOST_STARTS = 32
"""Most copies started or refused in a tick, each for the price of a placement."""
MOST_LEAVING = 4
"""Most sequences that leave a slow worker in a tick."""
LEAVING_TOKENS = 64
"""Tokens between two races of a sequence that is to leave slow workers."""
MOST_RECORDS = 4096
MISSED_LOADS, LEAST_SILENCE_SECONDS = 3, 0.2
"""Missing load reports after which a worker is late, whatever it does, and the shortest such silence."""


@dataclass(slots=True)
class Rhythm:
    """The steps of a worker."""

    gaps: Seen = field(default_factory=Seen)
    pace: StepPace = field(default_factory=StepPace)
    last_step: float = 0.0
    running: int = 0
    """Sequences with a token and without an end, after the last step."""
    margin: float | None = None
    """Seconds after a step at which the next one is late; None before enough was seen."""
    is_slow: bool = False

    def on_step(self, now: float, running: int) -> None:
        if self.running:
            self.gaps.add(now - self.last_step)
        self.last_step, self.running = now, running

    def is_late(self, now: float) -> bool:
        """Whether its next step is."""
        return bool(self.running and self.margin and now - self.last_step > self.margin)


@dataclass(slots=True)
class _Late:
    run: SequenceRun
    item: HedgedItem
    cause: Cause
    margin: float


@dataclass(slots=True)
class _Refusal:
    obstacle: Obstacle
    tokens: int
    """Of the sequence."""
    look: int


class Hedger:
    """Hedging as a background task of the router."""

    def __init__(self, token_share: float, fleet: Fleet, metrics: RouterMetrics) -> None:
        self.enabled = token_share > 0
        self.metrics = metrics
        self._fleet = fleet
        self._budget = Budget(token_share)
        self._wastes = Wastes()
        self._rhythms: dict[Worker, Rhythm] = {}
        self._waits: dict[str, Seen] = {}
        """Seconds beyond the prediction until first tokens, by model."""
        self._first_margins: dict[str, float | None] = {}
        self._snapshots: Mapping[str, WorkerSnapshot] = {}
        self._learn_at = 0.0
        self._delivered = 0
        self._records: deque[HedgeRecord] = deque(maxlen=MOST_RECORDS)
        self._refused: dict[SequenceRun, _Refusal] = {}
        """Late sequences that got no copy, until they have another token."""
        self._looks = 0
        self._raced: dict[SequenceRun, int] = {}
        """Tokens of sequences at the start of their last race."""

    async def run(self) -> None:
        """Looks again and again, but not after a pause of this process: steps of all workers wait to be read then."""
        loop = asyncio.get_running_loop()
        while True:
            expected = loop.time() + TICK_SECONDS
            await next_tick(TICK_SECONDS)
            if (now := loop.time()) - expected < TICK_SECONDS:
                try:
                    self.look(now)
                except Exception:
                    log.exception("hedging met a defect, and looks again")
                    await asyncio.sleep(DEFECT_SECONDS)

    def of_request(self, request_id: str, owner: str) -> list[HedgeRecord]:
        """What became of the late sequences of a request, in order; empty once forgotten."""
        return [
            each for each in self._records if (each.request_id, each.owner) == (request_id, owner)
        ]

    def look(self, now: float) -> None:
        """Starts copies of what is late now."""
        self._earn()
        if now >= self._learn_at:
            self._learn_at = now + LEARN_SECONDS
            self._learn()
        self._looks += 1
        left = MOST_STARTS
        for worker in self._in_turn():
            if not left:
                return
            late = [each for each in self._late_at(worker, now) if not self._raced_lately(each)]
            if late:
                left -= self._start_some(worker, nsmallest(left, late, key=self._last_try), now)

    def _in_turn(self) -> Sequence[Worker]:
        """The workers, each look another one first."""
        workers = [*self._rhythms]
        first = self._looks % max(1, len(workers))
        return workers[first:] + workers[:first]

    def _last_try(self, late: _Late) -> int:
        """The look that refused a sequence: what was not tried goes first, so that nothing waits for the hopeless."""
        return refusal.look if (refusal := self._refused.get(late.run)) else 0

    def _start_some(self, worker: Worker, late: Sequence[_Late], now: float) -> int:
        """Starts copies of late sequences of a worker; returns how many placements were tried."""
        peers = self._peers(worker, now)
        found = obstacles(peers[0], peers)
        texts = {peer.address: text(found[peer.address], peers[0], peer)
                 for peer in peers if peer.address in found}  # fmt: skip
        if len(found) == len(peers):
            others = {why: texts[at] for at, why in found.items() if at != worker.address}
            why = least(others)
            for each in late:
                self._refuse(worker, each, why, others.get(why, ""))
            return 0
        for each in late:
            self._start(worker, texts, each)
        return len(late)

    def _earn(self) -> None:
        delivered = sum(model.tokens_out for model in self.metrics.models.values())
        self._budget.earn(delivered - self._delivered)
        self._delivered = delivered

    def _learn(self) -> None:
        workers = self._fleet.workers.values()
        for gone in self._rhythms.keys() - set(workers):
            del self._rhythms[gone]
        for worker in workers:
            if worker not in self._rhythms:
                rhythm = self._rhythms[worker] = Rhythm()
                worker.watch(rhythm.on_step)
                worker.guard.on_first_token = partial(self._on_first_token, worker)
        self._learn_paces()
        models = self._fleet.models()
        self._waits = {model: self._waits.get(model, Seen()) for model in models}
        self._first_margins = {model: first_margin(seen) for model, seen in self._waits.items()}
        self._snapshots = {each.address: each for each in self._fleet.snapshot()}
        self._raced = {run: tokens for run, tokens in self._raced.items() if not run.over}
        self._refused = {
            run: refusal
            for run, refusal in self._refused.items()
            if not run.over and len(run.token_ids) == refusal.tokens
        }

    def _learn_paces(self) -> None:
        for rhythm in self._rhythms.values():
            rhythm.pace = StepPace(rhythm.gaps.usual(), rhythm.gaps.quantile(0.99))
        for worker, rhythm in self._rhythms.items():
            model = worker.description.model
            peers = [
                other.pace
                for peer, other in self._rhythms.items()
                if peer is not worker and peer.description.model == model
            ]
            rhythm.margin = step_margin(rhythm.pace, peers)
            rhythm.is_slow = is_slow(rhythm.pace, peers)

    def _on_first_token(self, worker: Worker, prompt_tokens: int, seconds: float) -> None:
        if (waits := self._waits.get(worker.description.model)) is not None:
            waits.add(seconds - self._predicted(worker, prompt_tokens))

    def _predicted(self, worker: Worker, prompt_tokens: int) -> float:
        """Seconds until the first token of a prompt that does not wait."""
        known = self._snapshots.get(worker.address)
        return prompt_tokens * known.prefill_seconds + known.step_seconds if known else 0.0

    def _late_at(self, worker: Worker, now: float) -> Iterator[_Late]:
        """The late sequences of a worker. Looks at single ones only where some are late: there may be thousands."""
        rhythm = self._rhythms[worker]
        if not worker.ready or not worker.sequences:
            rhythm.running = 0
            return
        if _is_silent(worker):
            yield from self._stalled(worker, 0.0, now)
            return
        margin = rhythm.margin
        if margin is not None and rhythm.is_late(now):
            yield from self._stalled(worker, margin, now)
        elif margin is not None and rhythm.is_slow:
            yield from self._leaving(worker, margin)
        yield from self._unbegun(worker, now)

    def _stalled(self, worker: Worker, margin: float, now: float) -> Iterator[_Late]:
        """Sequences whose next token, or any if there is no margin, did not come within it."""
        for run in [*worker.sequences.values()]:
            since = run.times.last_token
            began = since > run.times.assigned or not margin
            if began and now - since > margin:
                yield from _late(run, Cause.STALL, margin or LEAST_STEP_MARGIN)

    def _leaving(self, worker: Worker, margin: float) -> Iterator[_Late]:
        leaving = [
            late
            for run in worker.sequences.values()
            if run.times.has_token
            for late in _late(run, Cause.SLOW, margin)
            if not self._raced_lately(late)
        ]
        yield from nsmallest(MOST_LEAVING, leaving, key=self._last_try)

    def _unbegun(self, worker: Worker, now: float) -> Iterator[_Late]:
        """Sequences without a token from this worker, the longest there first."""
        margin = self._first_margins.get(worker.description.model)
        if margin is None:
            return
        for handle, booking in [*worker.guard.awaiting.items()]:
            run = worker.sequences.get(handle)
            if run is None:
                continue
            waited = now - run.times.assigned
            if waited <= margin:
                return
            late = waited > margin + self._predicted(worker, booking.prompt_tokens)
            if late:
                yield from _late(run, Cause.FIRST_TOKEN, margin)

    def _peers(self, worker: Worker, now: float) -> list[Peer]:
        """The worker first, then all others."""
        self._snapshots = {each.address: each for each in self._fleet.snapshot()}
        others = [each for each in self._rhythms if each is not worker]
        return [self._peer(each, now) for each in (worker, *others)]

    def _peer(self, worker: Worker, now: float) -> Peer:
        load, engine = worker.load, worker.description
        known, rhythm = self._snapshots.get(worker.address), self._rhythms[worker]
        return Peer(
            address=worker.address,
            kind={"name of the model": engine.model} | {**worker.capabilities.kind},
            is_exact=_is_exact(worker),
            is_ready=worker.ready and not worker.mismatch,
            is_late=rhythm.is_late(now) or _is_silent(worker),
            sequences=known.sequences if known else 0,
            most_running=engine.max_batch_size,
            waiting=load.waiting_sequences,
            wait_seconds=known.wait_seconds if known else 0.0,
            used_share=load.used_blocks / load.total_blocks if load.total_blocks else 0.0,
        )

    def _raced_lately(self, late: _Late) -> bool:
        """Whether the sequence had a copy at this token, or left a slow worker a moment ago."""
        rest = LEAVING_TOKENS if late.cause is Cause.SLOW else 1
        return len(late.run.token_ids) < self._raced.get(late.run, -rest) + rest

    def _start(self, worker: Worker, excluded: Mapping[str, str], late: _Late) -> None:
        """Starts a copy on a worker that is not excluded, or tells why not."""
        run, item = late.run, late.item
        price = self._price(worker, item.prompt_tokens + len(run.token_ids))
        waste = self._wastes.expected(late.cause)
        if self._budget.free < price + waste:
            self._refuse(worker, late, Obstacle.BUDGET)
            return
        record = self._record(worker, late)
        allowance = self._budget.reserve(waste)
        race = Race(run, item, record, self.metrics, self._wastes, allowance, late.margin)
        left_out = self._fleet.shorter_than(worker, item.prompt_tokens + run.most_tokens)
        left_out |= excluded
        try:
            refusal = item.hedge(race, left_out)
        except Exception:
            log.exception("no copy of a sequence of request %s, by a defect", run.request_id)
            self._raced[run] = record.token_offset
            refusal = "of a defect; the log tells more"
        if refusal:
            allowance.end()
            self._refuse(worker, late, Obstacle.ITEM, refusal)
            return
        self._budget.spend(price)
        self._records.append(record)
        self._raced[run] = record.token_offset
        self.metrics.hedges[late.cause.value, "started"] += 1
        self.metrics.hedge_copied_tokens += item.prompt_tokens + record.token_offset

    def _price(self, worker: Worker, tokens: int) -> float:
        known = self._snapshots.get(worker.address)
        if known is None:
            return float(tokens)
        running = known.decoding_sequences
        return copy_price(tokens, known.prefill_seconds, known.step_seconds, running)

    def _record(self, worker: Worker, late: _Late) -> HedgeRecord:
        run, item = late.run, late.item
        return HedgeRecord(
            item.caller,
            run.request_id,
            item.batch_index,
            run.sequence_index,
            len(run.token_ids),
            late.cause,
            worker.name,
        )

    def _refuse(self, worker: Worker, late: _Late, obstacle: Obstacle, detail: str = "") -> None:
        """Counts a refusal once, as long as a token is late for the same reason."""
        known, tokens = self._refused.get(late.run), len(late.run.token_ids)
        self._refused[late.run] = _Refusal(obstacle, tokens, self._looks)
        if known is None or (known.obstacle, known.tokens) != (obstacle, tokens):
            self.metrics.hedges_refused[obstacle.word] += 1
            record = self._record(worker, late)
            record.outcome, record.detail = "refused", detail or obstacle.text
            self._records.append(record)


def _late(held: Held, cause: Cause, margin: float) -> Iterator[_Late]:
    """The sequence, unless it is a copy already, or complete."""
    if not isinstance(held, SequenceRun) or held.over or held.stop_text is not None:
        return
    if isinstance(held.owner, HedgedItem):
        yield _Late(held, held.owner, cause, margin)


def _is_silent(worker: Worker) -> bool:
    """Whether load reports are missing, which come at a steady pace even from an idle worker."""
    most = max(LEAST_SILENCE_SECONDS, MISSED_LOADS * worker.description.load_interval_ms / 1000)
    return worker.silent_seconds > most


def _is_exact(worker: Worker) -> bool:
    """Whether equal requests have equal tokens there: to the bit, or in float32 but where two candidates nearly tie."""
    engine = worker.description
    in_float32 = engine.backend == "torch" and engine.data_type == pb.DATA_TYPE_FP32
    return worker.capabilities.is_exact or in_float32
