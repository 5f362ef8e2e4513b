"""The canary: has a sample of the items computed a second time, and rests a worker that two others contradict.

A sample waits in a bounded queue for a worker with idle capacity, one after another, and gives way to items. A
difference goes to a third worker at once, idle or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

from trtmesh.chassis.errors import TrtmeshError, forget_frames
from trtmesh.chassis.logs import Occasionally
from trtmesh.router.adapters.adapters import Adapters, ItemAdapter
from trtmesh.router.canary.repetition import Repetition
from trtmesh.router.canary.sample import SampledItem, has_room, is_chosen, repeatable
from trtmesh.router.canary.verdict import Generated, Side, Verdict, judged
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.fleet.worker_capabilities import unlike
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import AdapterNeed
from trtmesh.router.receipts import ItemReceipt, Receipts, encoded
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import engine_pb2 as engine_pb

log = logging.getLogger(__name__)

MOST_SAMPLES, MOST_TOKENS = 64, 2**20
"""Queued samples, and their tokens; beyond them the oldest are dropped."""
MOST_PROMPT_TOKENS = 2**17
"""A longer prompt would hold the event loop, and a worker for seconds."""
LOOK_SECONDS = 0.1
IDLE_SECONDS = 60.0
"""Longest wait of a sample for idle capacity."""
THIRD_SECONDS = 300.0
"""Longest wait of a difference for a third worker."""
MOST_ATTEMPTS = 3
"""Workers that may fail with a repetition: the sample itself may be what they fail with."""
IDLE_PART = 4
"""A worker has idle capacity while it runs no more than this part of its batch."""
WARNING_SECONDS = 600.0


class Canary:
    """Samples of a router's items, and what was found."""

    def __init__(
        self,
        share: float,
        fleet: Fleet,
        adapters: Adapters,
        receipts: Receipts,
        metrics: RouterMetrics,
    ) -> None:
        self._share = share
        self._fleet, self._adapters, self._receipts = fleet, adapters, receipts
        self._counts, self._note_alert = metrics.canary_items, metrics.note_canary_alert
        self._waiting: deque[SampledItem] = deque()
        self._tokens = 0
        self._examining = False
        self._news = asyncio.Event()
        self._warn = Occasionally(log, WARNING_SECONDS)

    def chooses(self, request_id: str, batch_index: int) -> bool:
        """Whether an item is sampled once it is over."""
        return is_chosen(self._share, request_id, batch_index)

    def add(
        self,
        receipt: ItemReceipt,
        item: ItemRequest,
        runs: Sequence[SequenceRun],
        adapter: ItemAdapter | None,
        need: AdapterNeed | None,
        new_command: Callable[[], engine_pb.SubmitCommand],
    ) -> None:
        """Queues a sampled item with its complete receipt, unless it cannot be compared."""
        signed, outputs = receipt.signed, [Generated.of(run) for run in runs]
        if signed is None or not any(output.token_ids for output in outputs):
            return
        kinds = [taker.worker.capabilities.kind for taker in receipt.takers]
        is_mixed = any(kind != kinds[0] for kind in kinds)
        is_long = receipt.prompt_tokens > MOST_PROMPT_TOKENS
        if is_mixed or is_long or any(run.error or run.is_beam for run in runs):
            self._counts["unfit"] += 1
            return
        for span in receipt.content.workers:
            if not span.exact:
                self._counts["inexact"] += 1
                self._warn(
                    "inexact",
                    logging.WARNING,
                    "canary_share: items of worker %s are not compared, as it does not promise equal tokens; torch does"
                    " with batch_invariant",
                    span.worker,
                )
                return
        command = repeatable(new_command(), outputs)
        content, takers = receipt.content, receipt.takers
        sample = SampledItem(item, command, adapter, need, outputs, content, signed, takers)
        self._waiting.append(sample)
        self._tokens += sample.tokens
        while len(self._waiting) > MOST_SAMPLES or self._tokens > MOST_TOKENS:
            self._tokens -= self._waiting.popleft().tokens
            self._counts["dropped"] += 1
        self._news.set()

    @property
    def waiting(self) -> int:
        """Samples that are not compared yet."""
        return len(self._waiting) + self._examining

    async def run(self) -> None:
        """Examines one sample after another, until cancelled."""
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            sample, self._examining = self._waiting.popleft(), True
            self._tokens -= sample.tokens
            if sample.adapter is not None:
                self._adapters.usages.of(sample.adapter.identity).live += 1
            try:
                await self._examine(sample)
            except Exception:
                self._counts["failed"] += 1
                log.exception("the canary could not compare %s", sample.name)
            finally:
                self._examining = False
                if sample.adapter is not None:
                    self._adapters.ended(sample.adapter)

    async def _examine(self, sample: SampledItem) -> None:
        known = {taker.worker.address for taker in sample.takers}
        second = await self._repeated(sample, known, IDLE_SECONDS, idle=True)
        if second is None:
            self._counts["dropped"] += 1
            self._warn_of_unlike(sample, known)
            return
        first = judged(sample.outputs, second.outputs, None)
        if first is None:
            self._counts["identical"] += 1
            return
        self._counts["different"] += 1
        # Another worker of the item may decide too: it computes the whole anew.
        doubted = sample.worker_at(first.where)
        known = {second.worker.address, *([doubted.address] if doubted else known)}
        third = await self._repeated(sample, known, THIRD_SECONDS, idle=False)
        verdict = first
        if third is not None:
            verdict = judged(sample.outputs, second.outputs, third.outputs) or first
        self._report(sample, verdict, second, third)

    def _warn_of_unlike(self, sample: SampledItem, known: Collection[str]) -> None:
        """Tells what differs where no other worker of the model computes as the item's did."""
        model = sample.receipt.model
        others = [
            each
            for each in self._fleet.workers.values()
            if each.address not in known and each.description.model == model
        ]
        found = {unlike(sample.kind, each.capabilities.kind) for each in others}
        if found and "" not in found:
            self._warn(
                "unlike",
                logging.WARNING,
                "canary_share: items of worker %s are not compared, as no other one is exact with it; what differs: %s",
                sample.takers[0].worker.name,
                "; ".join(sorted(found)),
            )

    async def _repeated(
        self, sample: SampledItem, known: Collection[str], seconds: float, *, idle: bool
    ) -> Repetition | None:
        """The sample on a worker whose address is not known; None if there is none within the time, or some failed."""
        loop = asyncio.get_running_loop()
        ends_at, tried = loop.time() + seconds, {*known}
        while loop.time() < ends_at and len(tried) < len(known) + MOST_ATTEMPTS:
            fit = [w for w in self._fleet.workers.values() if _is_fit(w, sample, tried)]
            if not fit:
                return None
            able = [w for w in fit if w.ready and (not idle or _is_idle(w, sample))]
            for worker in sorted(able, key=lambda worker: _reluctance(worker, sample))[:1]:
                repetition = Repetition(sample, worker)
                try:
                    if await repetition.compute(gives_way=idle):
                        return repetition
                except TrtmeshError as error:
                    log.info("the canary left worker %s: %s", worker.name, error.message)
                    forget_frames(error)
                    tried.add(worker.address)
            await asyncio.sleep(LOOK_SECONDS)
        return None

    def _report(
        self, sample: SampledItem, verdict: Verdict, second: Repetition, third: Repetition | None
    ) -> None:
        """Tells of a difference with the receipts of all sides, and rests the worker at fault, if it is known."""
        where, worker = verdict.where, None
        if verdict.side is not Side.UNKNOWN:
            is_items = verdict.side is Side.ITEM
            worker = sample.worker_at(where) if is_items else second.worker
        name = worker.name if worker is not None else "unknown"
        self._note_alert(name)
        again = [each for each in (second, third) if each is not None]
        receipts = (
            self._receipts.repeated(sample.receipt, each.worker, each.runs) for each in again
        )
        log.error(
            "silent corruption: item %s differs from what %s generated, from token %d of sequence %d on; at fault: %s;"
            " %s; receipts: %s",
            sample.name,
            " and ".join(each.worker.name for each in again),
            where.offset,
            where.sequence_index,
            name,
            sample.facts,
            " ".join(map(encoded, (sample.signed, *receipts))),
        )
        if worker is not None and self._fleet.workers.get(worker.address) is worker:
            worker.rest(
                f"two workers contradict its tokens of item {sample.name}; look for the cause, then"
                f" `trtmesh workers resume {name}`"
            )


def _is_fit(worker: Worker, sample: SampledItem, known: Collection[str]) -> bool:
    """Whether a worker could compute a sample as its item was, now or once it is ready again."""
    able = worker.capabilities
    need, command = sample.need, sample.command
    return (
        worker.address not in known
        and not worker.drained
        and not worker.mismatch
        and able.kind == sample.kind
        and able.is_exact
        and sample.item.worker_fields <= able.supported_fields
        and has_room(command, able.max_sequence_tokens)
        and sample.item.sequences <= able.max_sequences
        and (need is None or need.deliverable or need.key in worker.adapters.held)
        and not (need is not None and worker.adapters.is_full(need))
    )


def _is_idle(worker: Worker, sample: SampledItem) -> bool:
    load = worker.load
    most = max(1, worker.description.max_batch_size // IDLE_PART)
    return (
        not load.waiting_sequences
        and worker.guard.sequences + sample.item.sequences <= max(most, sample.item.sequences)
        and 2 * load.used_blocks <= load.total_blocks
    )


def _reluctance(worker: Worker, sample: SampledItem) -> tuple[bool, int, int]:
    """Orders workers: those with the adapter first, then by load, then each sample another way."""
    need = sample.need
    lacks = need is not None and need.key not in worker.adapters.held
    return lacks, worker.guard.sequences, hash((sample.name, worker.address))
