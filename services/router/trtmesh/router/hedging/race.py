"""Two copies of a sequence on two workers, until one is ahead; the other is stopped, and compared where both computed.

Streams are functions of their request, so the client sees one stream whichever copy delivers. While a race lasts, the
first copy stands in the place of the sequence at its worker and passes everything on to it, the second keeps what it
computes, and the race holds the sequence in the place of the worker: so whoever ends, moves or stops the sequence ends
the race, and nothing else knows of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.logs import request_id_bound
from trtmesh.router.fleet.assignments import Handle
from trtmesh.router.fleet.plan import Leg
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.hedging.lateness import Allowance, Cause, Obstacle, Wastes
from trtmesh.router.links.contract import ContractBroken
from trtmesh.router.metrics import ModelMetrics, RouterMetrics
from trtmesh.router.streams.sequence import (
    COMPLETE,
    Charge,
    End,
    SequenceRun,
    SequenceTimes,
)
from trtmesh.v1 import engine_pb2 as worker_pb
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

PUNCTUAL_STEPS = {Cause.STALL: 2, Cause.FIRST_TOKEN: 1, Cause.SLOW: 16}
"""Steps in time after which the first copy has won: a stalled worker recovered, a slow one was not so slow."""


@dataclass(slots=True)
class HedgeRecord:
    """What became of a race, or why there was none; for `trtmesh explain`."""

    owner: str
    request_id: str
    batch_index: int
    sequence_index: int
    token_offset: int
    cause: Cause
    worker: str
    second: str = ""
    outcome: str = "running"
    """running, won by the second copy, lost by it, ended with the sequence, or refused."""
    detail: str = ""
    wasted_tokens: int = 0
    saved_seconds: float = 0.0
    differs: bool = False


@runtime_checkable
class HedgedItem(Protocol):
    """The item of a sequence, as hedging sees it; repetitions of the canary are none."""

    caller: str
    batch_index: int
    prompt_tokens: int

    def hedge(self, race: Race, left_out: Mapping[str, str]) -> str:
        """Starts the second copy of a race on a worker that is not left out; returns why it does not, or ''."""

    def switched(
        self, run: SequenceRun, address: str, worker: Worker, lost: TrtmeshError | None
    ) -> None:
        """The sequence goes on at `worker`; the one at `address` was `lost`, or only behind."""

    def copy_dropped(self, run: SequenceRun, outcome: str) -> None:
        """The second copy of the sequence was stopped."""

    def note_absence(self, address: str, error: TrtmeshError) -> None:
        """Notes that the worker at `address` lacks the item's adapter, if that is the `error`."""


class CopyTimes(SequenceTimes):
    """Times of a copy, whose tokens count only once they are delivered."""

    def on_tokens(self, _count: int, now: float, _metrics: ModelMetrics) -> None:
        self.last_token = now


@dataclass(slots=True)
class _Chunk:
    offset: int
    token_ids: list[int]
    details: pb.TokenDetails | None


class Race:
    """A race; the assignment of its sequence, and the owner of both copies."""

    def __init__(
        self,
        run: SequenceRun,
        item: HedgedItem,
        record: HedgeRecord,
        metrics: RouterMetrics,
        wastes: Wastes,
        allowance: Allowance,
        margin: float,
    ) -> None:
        """A step of the first worker within `margin` seconds of the one before is in time."""
        assert isinstance(run.assignment, Handle)
        self.run = run
        self.record = record
        self._metrics, self._wastes = metrics, wastes
        self._item = item
        self._allowance = allowance
        self._margin = margin
        self._punctual = 0
        self.first = run.assignment
        self.second: Handle | None = None
        self._worker: Worker | None = None
        self._rival: SecondCopy | None = None
        """While the race lasts."""
        self.over = False

    def begin(self, leg: Leg, submit: Callable[[Leg, SecondCopy], None]) -> None:
        """Starts the second copy on the worker of a leg. Raises TrtmeshError, and nothing is begun."""
        rival = SecondCopy(self, self.run)
        submit(leg, rival)
        self._worker, self._rival, self.second = leg.worker, rival, rival.handle
        self.record.second = leg.worker.name
        self.first.substitute(FirstCopy(self, self.run))
        self.run.assignment = self

    # The assignment of the sequence: what the router does to it ends the race.

    @property
    def address(self) -> str:
        return self.first.address

    def stop(self, reason: pb.FinishReason.ValueType) -> None:
        self.drop("ended")
        self.first.stop(reason)

    def release(self, error: TrtmeshError | None) -> None:
        self.drop("ended")
        self.first.release(error)

    def leave_kv(self, lease_id: str, seconds: float) -> None:
        self.drop("ended")
        self.first.leave_kv(lease_id, seconds)

    # From the workers, of which each has one of the copies.

    def migrate(self, _copies: Sequence[object], address: str, error: TrtmeshError) -> bool:
        """Leaves a suspect or draining worker: the other copy goes on."""
        if address == self.first.address:
            self._switch(None)
        else:
            self.drop("lost", error.message)
        return True

    def hand_over(self, copies: Sequence[object], _address: str, _cause: str) -> Sequence[object]:
        """Returns the copy: a race is short, and its KV does not move."""
        return copies

    def first_advanced(self, seconds: float) -> None:
        """The first worker delivered `seconds` after its last token."""
        self._punctual += self.record.cause is not Cause.STALL or seconds <= self._margin
        if not self.over and self._punctual >= PUNCTUAL_STEPS[self.record.cause]:
            self.drop("lost", "the first worker recovered")
        self.check_allowance()

    def check_allowance(self) -> None:
        """Stops a copy that is so far behind that its share of the tokens does not bring it ahead."""
        if self._rival is None:
            return
        behind = len(self.run.token_ids) - len(self._rival.token_ids)
        if behind > 0 and not self._allowance.covers(behind):
            self.drop("lost", Obstacle.BUDGET.text)

    def first_ended(self, end: End) -> None:
        if end.error is not None and end.error.row.movable:
            self.first_lost(end.error)
        else:
            self.drop("ended")
            self.run.on_end(end)

    def first_lost(self, error: TrtmeshError) -> None:
        """The second copy goes on alone."""
        self._switch(error)

    def second_ahead(self, chunks: Sequence[_Chunk]) -> None:
        """Delivers what the second copy has, and stops the first."""
        run, now = self.run, asyncio.get_running_loop().time()
        before = len(run.token_ids)
        self._switch(None)
        for chunk in chunks:
            run.on_tokens(chunk.offset, chunk.token_ids, chunk.details)
        if fresh := len(run.token_ids) - before:
            run.times.on_tokens(fresh, now, self._metrics.models[run.model])
        if run.charge is not None:
            run.charge.up_to(len(run.token_ids), now)

    def copy_failed(self, error: TrtmeshError) -> None:
        """The second worker refused or lost its copy."""
        assert self.second
        self._item.note_absence(self.second.address, error)
        self.drop("lost", error.message)

    def drop(self, outcome: str, detail: str = "") -> None:
        """The first copy goes on alone, or the sequence ends."""
        if self.over:
            return
        assert self.second
        self.first.substitute(self.run)
        self.run.assignment = self.first
        self.second.lose(LosingCopy(self))
        self._item.copy_dropped(self.run, outcome)
        self._end(outcome, detail)

    def _switch(self, lost: TrtmeshError | None) -> None:
        """The sequence goes on at the second worker."""
        assert self.second
        assert self._worker
        assert self._rival
        self.first.lose(LosingCopy(self, _saves=True))
        self.second.substitute(self.run)
        self.run.assign(self.second)
        # Not now: a sequence with a token since has begun there.
        self.run.times.assigned = self._rival.times.assigned
        # What a copy behind still lacks is computed there again.
        self.wasted(len(self.run.token_ids) - len(self._rival.token_ids))
        self._end("won")
        self._item.switched(self.run, self.first.address, self._worker, lost)

    def _end(self, outcome: str, detail: str = "") -> None:
        self.over = True
        self._rival = None
        self.record.outcome, self.record.detail = outcome, detail
        self._metrics.hedges[self.record.cause.value, outcome] += 1

    def wasted(self, tokens: int) -> None:
        """Counts tokens that both copies computed."""
        if tokens > 0:
            self.record.wasted_tokens += tokens
            self._allowance.spend(tokens)
            self._metrics.hedge_wasted_tokens += tokens

    def settle(self) -> None:
        """The copy that was stopped is gone."""
        self._allowance.end()
        self._wastes.add(self.record.cause, self.record.wasted_tokens)

    def gone(self, since: float) -> None:
        """The first worker gave its first sign since the second copy won, or is lost: until then the client would have
        waited."""
        seconds = asyncio.get_running_loop().time() - since
        self.record.saved_seconds = seconds
        self._metrics.hedge_saved_seconds += seconds

    def same(self, offset: int, token_ids: Sequence[int]) -> bool:
        """Compares tokens of a copy with those that the sequence has."""
        known = self.run.token_ids[offset : offset + len(token_ids)]
        if known == token_ids[: len(known)]:
            return True
        if not self.record.differs:
            self.record.differs = True
            pairs = enumerate(zip(known, token_ids, strict=False), offset)
            place, tokens = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            self._report_difference(place, tokens)
        return False

    def _report_difference(self, offset: int, tokens: tuple[int, int]) -> None:
        """A worker computes wrongly, or is said to be exact and is not."""
        self._metrics.hedge_differences += 1
        record = self.record
        with request_id_bound(record.request_id):
            log.error(
                "the workers %s and %s have other tokens at %d of sequence %d of item %d: %d and %d; one of them"
                " computes wrongly, or with other settings",
                *(record.worker, record.second, offset),
                *(record.sequence_index, record.batch_index, *tokens),
            )


class Copy:
    """What both copies have of their sequence."""

    def __init__(self, race: Race, run: SequenceRun) -> None:
        self._race = race
        self._run = run
        self.owner = race
        self.model, self.request_id = run.model, run.request_id
        self.sequence_index, self.most_tokens = run.sequence_index, run.most_tokens

    @property
    def address(self) -> str:
        return self._run.address

    @property
    def waits_for_worker(self) -> bool:
        return self._run.waits_for_worker


class FirstCopy(Copy):
    """The sequence at its first worker."""

    def __init__(self, race: Race, run: SequenceRun) -> None:
        super().__init__(race, run)
        self.times = run.times
        self.charge = run.charge

    @property
    def token_ids(self) -> list[int]:
        return self._run.token_ids

    @property
    def assignment(self) -> object | None:
        return self._run.assignment

    def assign(self, assignment: Handle) -> None:
        raise AssertionError("it has its worker")

    def on_tokens(
        self, token_offset: int, token_ids: list[int], details: pb.TokenDetails | None = None
    ) -> None:
        seconds = asyncio.get_running_loop().time() - max(
            self.times.last_token, self.times.assigned
        )
        self._run.on_tokens(token_offset, token_ids, details)
        self._race.first_advanced(seconds)

    def on_prompt(self, details: pb.PromptDetails) -> None:
        self._run.on_prompt(details)

    def on_start(self, metrics: pb.PerfMetrics) -> None:
        self._run.on_start(metrics)

    def check_end(self, end: worker_pb.SequenceEnd) -> None:
        self._run.check_end(end)

    def on_end(self, end: End) -> None:
        self._race.first_ended(end)

    def on_worker_lost(self, error: TrtmeshError) -> None:
        self._race.first_lost(error)


class SecondCopy(Copy):
    """The copy at the second worker, from the tokens that the sequence had at the start of the race."""

    charge: Charge | None = None

    def __init__(self, race: Race, run: SequenceRun) -> None:
        super().__init__(race, run)
        self.token_ids = [*run.token_ids]
        self.times = CopyTimes(run.times.arrival, run.times.latencies)
        self.assignment: Handle | None = None
        self._chunks: list[_Chunk] = []
        self._start: pb.PerfMetrics | None = None

    @property
    def handle(self) -> Handle:
        assert self.assignment
        return self.assignment

    def assign(self, assignment: Handle) -> None:
        self.assignment = assignment
        self.times.on_assigned()

    def on_tokens(
        self, token_offset: int, token_ids: list[int], details: pb.TokenDetails | None = None
    ) -> None:
        """Keeps tokens, and delivers them once they are ahead. Raises ContractBroken."""
        known = len(self.token_ids) - token_offset
        if known or token_offset + len(token_ids) > self.most_tokens:
            raise ContractBroken(
                f"it sent {len(token_ids)} tokens from {token_offset} of a copy of request {self.request_id!r}, where"
                f" {len(self.token_ids)} was next and {self.most_tokens} are the most"
            )
        self.token_ids += token_ids
        self._chunks.append(_Chunk(token_offset, token_ids, details))
        race = self._race
        race.wasted(min(len(race.run.token_ids) - token_offset, len(token_ids)))
        if not race.same(token_offset, token_ids):
            race.drop("lost", "the copies have other tokens")
        elif len(self.token_ids) > len(race.run.token_ids):
            self._lead()
        else:
            race.check_allowance()

    def _lead(self) -> None:
        if self._start is not None:
            self._run.on_start(self._start)
        self._race.second_ahead(self._chunks)

    def on_prompt(self, details: pb.PromptDetails) -> None:
        """Nothing: the first worker reported it, or the item has no second copy."""

    def on_start(self, metrics: pb.PerfMetrics) -> None:
        self._start = metrics

    def check_end(self, end: worker_pb.SequenceEnd) -> None:
        """Raises ContractBroken for a complete copy of which not all tokens came."""
        if end.reason in COMPLETE and end.generated_tokens != len(self.token_ids):
            raise ContractBroken(
                f"it ended a copy of request {self.request_id!r} after {end.generated_tokens} tokens, of which"
                f" {len(self.token_ids)} came"
            )

    def on_end(self, end: End) -> None:
        """A copy that ends where the sequence is complete brings its end."""
        race = self._race
        if end.error is not None:
            race.copy_failed(end.error)
        elif end.reason not in COMPLETE:
            race.drop("lost", "its worker ended it")
        elif len(self.token_ids) < len(race.run.token_ids):
            race.drop("lost", "it ended where the sequence went on")
        else:
            self._lead()
            self._run.on_end(end)

    def on_worker_lost(self, error: TrtmeshError) -> None:
        self._race.copy_failed(error)


@dataclass(slots=True)
class LosingCopy:
    """A copy that was stopped, until its worker reports the end: what still comes is compared."""

    _race: Race
    _saves: bool = False
    """Whether it is that of the first worker, and gave no sign yet."""
    _since: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def on_tokens(self, token_offset: int, token_ids: list[int]) -> None:
        self._on_sign()
        self._race.wasted(len(token_ids))
        self._race.same(token_offset, token_ids)

    def on_gone(self) -> None:
        """The worker reported the end, or is lost."""
        self._on_sign()
        self._race.settle()

    def _on_sign(self) -> None:
        if self._saves:
            self._saves = False
            self._race.gone(self._since)
