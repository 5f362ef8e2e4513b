"""The story of an item: admit → encode → place → generate → decode → finish.

* The item holds a permit from start to end.
* Every item ends with exactly one terminal event, independently of the other items.
* Placing books a plan on the fleet. A worker without the item's adapter loads it before the dispatch.
* A split plan is a handoff from the first leg to the second. `handoffs/item_handoffs.py` leads all handoffs, of paused
  and moved sequences too.
* A sequence without a worker, lost or left, is placed again with all tokens.
* Decoding runs beside generation: worker → sequence → tokenizer → client, without this task.
* When a tokenizer finds a stop text, the worker stops the sequence.
* Without a client the item stops every sequence, so workers compute no unread tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from trtmesh.chassis.errors import AdapterNotFound, Draining, HandoffFailed, NoWorker, TrtmeshError
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.tasks import until_all_end, until_first_ends
from trtmesh.router.adapters.adapters import ItemAdapter
from trtmesh.router.admission import Permit
from trtmesh.router.fleet.plan import Leg, Plan
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.fleet.worker_capabilities import WorkerCapabilities
from trtmesh.router.handoffs.client_halves import state_of
from trtmesh.router.handoffs.item_handoffs import ItemHandoffs
from trtmesh.router.handoffs.live_handoff import NO_LEASE, Lease
from trtmesh.router.hedging.race import Race
from trtmesh.router.receipts import ItemReceipt
from trtmesh.router.requests.context import RequestContext
from trtmesh.router.requests.encoding import (
    NOT_ENCODED,
    EncodedItem,
    encode_item,
    with_adapter_of_now,
)
from trtmesh.router.requests.item_events import ItemEvents
from trtmesh.router.requests.placer import Placer, too_many_losses
from trtmesh.router.streams.sequence import Charge, Delivery, End, SequenceRun, SequenceTimes
from trtmesh.router.tracing import ItemTrace
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2 as receipt_pb


class _NotLoadedError(Exception):
    """A worker cannot load the item's adapter now."""


class ItemRun:
    """A live item."""

    def __init__(
        self,
        context: RequestContext,
        item: ItemRequest,
        permit: Permit,
        on_over: Callable[[], None],
    ) -> None:
        """Calls `on_over` at the end: maybe before the task ends, and not if the task never began."""
        self._on_over = on_over
        self._context = context
        self._mesh = context.mesh
        self._item = item
        self._permit = permit
        self._events = ItemEvents(item.batch_index, context)
        self._trace = None if context.trace is None else context.trace.item(item)
        self._placer = Placer(context, item, self._trace)
        seed = item.config.sampling.seed
        self._seed = context.drawn_seed if seed is None else seed
        receipts, self._receipt = context.mesh.receipts, None
        canary = context.mesh.canary
        self._sampled = canary is not None and canary.chooses(context.request_id, item.batch_index)
        if receipts.file or item.config.output.receipt or self._sampled:
            self._receipt = receipts.begin(context.request_id, context.model, item, self._seed)
        self._handoffs: ItemHandoffs | None = None
        """None before the first, which most items never have."""
        self._is_half = item.is_context_only
        self._resumed = bool(context.received.sequences) and context.received.has(item.batch_index)
        self._stop_asked = False
        self._over = False
        self._delivered = False
        """Whether a worker had to load the adapter."""
        self._encoded = NOT_ENCODED
        self._runs: list[SequenceRun] = []
        self._error: Exception | None = None
        """Why it ends, or a defect: met on the way of others, which must go on."""
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        """Done once the item must look at its state again. An Event costs a start five calls more."""
        self._task: asyncio.Task[None] | None = None
        self.encode_seconds = 0.0
        self.queue_seconds: float | None = None
        """From the request's arrival to the first dispatch; None before."""
        self.over_ns = 0
        """Monotonic time of a complete item's end."""
        self.stage = "admit"
        self._worker: Worker | None = None
        self._able: WorkerCapabilities | None = None
        """What the latest worker could do when it took the item."""

    async def run(self) -> None:
        """Runs the item from admission to the terminal event."""
        self._task = asyncio.current_task()
        try:
            await self._admit()
            await self._encode()
            await self._open()
            while not (self._over or self._settled):
                await self._place()
                await self._generate()
            if not self._over:
                await self._turn()
                self._finish()
        except TrtmeshError as error:
            self._events.failed(error, self.usage())
        except asyncio.CancelledError:
            self._cancelled()
        except Exception as error:  # noqa: BLE001 - a defect ends the affected item alone, visibly
            self._events.broke(error, self.usage())
        finally:
            if not self._over:
                self._abandon()

    async def _admit(self) -> None:
        if self._stop_asked:
            raise asyncio.CancelledError
        await self._permit.admitted(self._item.config.priority)

    async def _encode(self) -> None:
        self.stage = "encode"
        context = self._context
        # The loop's clock counts milliseconds and stands still within a pass.
        began = time.monotonic()
        try:
            traceparent = "" if self._trace is None else self._trace.traceparent
            self._encoded = await encode_item(context, self._item, traceparent)
        except TrtmeshError:
            if context.siblings is not None:
                await self._turn()
            raise
        self.encode_seconds = time.monotonic() - began
        if self._encoded.adapter is not None:
            # Before any await: its end is told however the item ends.
            self._mesh.adapters.began(self._encoded.adapter)
        if context.siblings is not None:
            # A tokenizer answers hundreds in one message.
            await self._turn()
        if context.bucket is not None and not self._resumed:
            context.bucket.spend(self.prompt_tokens, self._loop.time())

    async def _open(self) -> None:
        """Waits for a sibling with the same prefix, then opens sequences resumed from another router, or from the state
        of a first half."""
        self.stage = "place"
        received = self._context.received.longest(self._item.batch_index) if self._resumed else 0
        # Before received tokens are given to a tokenizer.
        await self._placer.prepare(self._encoded, received)
        if self._resumed:
            self.open_sequences()
        elif self._item.state is not None:
            self._begun_handoffs().continue_half(self._item.state)

    async def _place(self) -> None:
        """Dispatches all sequences without a worker, once the client has read enough and a worker takes them."""
        while self._needs_worker and self._error is None:
            if self._context.pace.paused:
                self.stage = "paused"
                self._placer.drop_promise()
                await self._next_news()
                continue
            self.stage = "place"
            await self._turn()
            # Everything may have changed meanwhile.
            waiting = self._waiting
            if not self._may_be_placed or (self._handoffs and self._handoffs.resume(waiting)):
                continue
            if waiting and self._end_complete(waiting):
                continue
            try:
                plan = self._placer.place(self._encoded, waiting)
            except (NoWorker, AdapterNotFound) as error:
                await self._wait_for_worker(error)
                continue
            try:
                if self._encoded.adapter is None or await self._deliver(plan, waiting):
                    self._dispatch(plan, waiting)
                    return
            except BaseException:
                plan.release()
                raise
            plan.release()

    def _end_complete(self, waiting: Sequence[SequenceRun]) -> bool:
        """Ends sequences that their last token completed, whose worker, or router, was lost before it said so. Returns
        whether there are any."""
        if self._is_half or self._item.config.beam_search.beam_width > 1:
            # Their ends bring more than tokens.
            return False
        begun = [run for run in waiting if run.token_ids]
        able = self._able or self._mesh.fleet.longest(self._context.model)
        if not begun or able is None:
            return False
        rule = EndRule(
            self._item.config.stopping,
            (*able.end_ids, *self._encoded.end_ids),
            0,
            min(able.longest_sequence - self.prompt_tokens, begun[0].most_tokens),
        )
        ends = [(run, end) for run in begun if (end := rule.end_after(run.token_ids))]
        for run, end in ends:
            run.end_as(*end)
        return bool(ends)

    def _next_news(self) -> asyncio.Future[None]:
        """Done once the item must look at its state again."""
        self._news = self._loop.create_future()
        return self._news

    def _turn(self) -> Coroutine[Any, Any, None]:
        """Waits for a turn, so that a burst of starts, ends or losses does not hold up running streams; what runs goes
        before what starts."""
        context = self._context
        return (context.running if self._runs else context.starting).turn()

    async def _deliver(self, plan: Plan, waiting: Sequence[SequenceRun]) -> bool:
        """Has the plan's workers load the item's adapter; False if the item must be placed again."""
        adapter = self._encoded.adapter
        assert adapter is not None
        workers = [leg.worker for leg in plan.legs]
        lacking = [worker for worker in workers if not worker.adapters.holds(adapter.identity)]
        if adapter.version is None or not lacking:
            return True
        self.stage = "load"
        self._delivered = True
        loading = until_all_end(*(self._load(worker, adapter) for worker in lacking))
        try:
            await until_first_ends(loading, self._no_worker_needed())
        except _NotLoadedError:
            return False
        # Everything may have changed meanwhile.
        ready = all(worker.ready for worker in workers)
        return ready and self._may_be_placed and waiting == self._waiting

    async def _load(self, worker: Worker, adapter: ItemAdapter) -> None:
        """Has a worker load the adapter. Raises _NotLoadedError if another worker may."""
        try:
            await worker.hold(adapter)
        except TrtmeshError as error:
            if not error.row.movable:
                if adapter.brought:
                    raise
                error = await self._mesh.adapters.take_back(adapter, error)
                if await self._takes_another(adapter):
                    raise _NotLoadedError from error
            if not self._placer.lost(worker.address, error, self.generated_tokens):
                raise too_many_losses(self._placer.attempts.fruitless, error) from error
            raise _NotLoadedError from error

    async def _takes_another(self, adapter: ItemAdapter) -> bool:
        """Whether another version replaces the version of an item that has not begun and asked for no version."""
        asked = self._item.config.lora
        if self._runs or asked is None or asked.version is not None:
            return False
        if self._encoded.adapter is adapter:
            encoded = await with_adapter_of_now(self._context, self._item.config, self._encoded)
            assert encoded.adapter is not None
            self._mesh.adapters.ended(adapter)
            self._mesh.adapters.began(encoded.adapter)
            self._encoded = encoded
        assert self._encoded.adapter is not None
        return self._encoded.adapter.identity != adapter.identity

    async def _no_worker_needed(self) -> None:
        """Waits until the item must not be placed now."""
        while self._may_be_placed:
            await self._next_news()

    async def _generate(self) -> None:
        """Waits until all sequences ended, or any failed or needs another worker."""
        self.stage = "generate" if self._runs else "reserve"
        while not (self._over or self._settled or self._needs_worker or self._error is not None):
            await self._next_news()
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        usage = self.usage()
        receipt = None if self._receipt is None else self._given_receipt(self._receipt)
        self._events.finished(self._runs, usage, receipt)
        if self._is_half:
            self._begun_handoffs().give()
            return
        tokens = usage.generated_tokens / len(self._runs)
        self._mesh.fleet.learn_new_tokens(self._context.model, tokens)

    def _given_receipt(self, receipt: ItemReceipt) -> receipt_pb.SignedReceipt | None:
        """The receipt for a client that asks for it."""
        if not receipt.is_asked:
            return None
        return receipt.end(self._runs, self._encoded.token_ids, self._encoded.identity)

    def _abandon(self) -> None:
        """Stops running sequences, on every way out, and tells the end."""
        # First: the end of a handoff lets a worker that is drained move its next sequence, which must not be of here.
        self._over = True
        for run in self._runs:
            if not run.over:
                run.end(pb.FINISH_REASON_CANCELLED, deliver=Delivery.NOTHING)
        if self._handoffs is not None:
            self._handoffs.cancel()
        if self._encoded.adapter is not None:
            self._mesh.adapters.ended(self._encoded.adapter)
        self._placer.close()
        if self._receipt is not None:
            self._receipt.end(self._runs, self._encoded.token_ids, self._encoded.identity)
            if self._sampled:
                self._give_sample(self._receipt)
        if (recorder := self._mesh.recorder) is not None:
            error = self._events.error
            self._placer.note_end(recorder, self._encoded, self.generated_tokens, error)
        self.stage = "over"
        if self._trace is not None:
            events, usage = self._events, self.usage()
            self._trace.over(self._runs, usage, events.reason, events.error, self.queue_seconds)
        self._on_over()

    def _give_sample(self, receipt: ItemReceipt) -> None:
        """Has the canary compare the item, which is over."""
        encoded, canary = self._encoded, self._mesh.canary
        assert canary is not None
        whole = partial(self._placer.whole, encoded)
        canary.add(receipt, self._item, self._runs, encoded.adapter, encoded.need, whole)

    def stop(self) -> bool:
        """Ends the item early and delivers everything generated; False for an item already over."""
        if self._over:
            return False
        self._stop_asked = True
        self._context.running.add(self)
        return True

    def proceed(self) -> None:
        """Stops in a turn: a request may have thousands of items."""
        if self._over:
            return
        for run in self._runs:
            run.end(pb.FINISH_REASON_STOPPED, deliver=Delivery.ALL)
        if self._handoffs is not None:
            self._handoffs.cancel()
        if not self._runs and self._task is not None:
            self._task.cancel()

    def dissolve(self) -> None:
        """Breaks the item's reference cycles after the end."""
        self._runs = []
        if self._handoffs is not None:
            self._handoffs.dissolve()
        # A raised error references the item through the traceback.
        self._error = None
        self._task = None

    @property
    def worker(self) -> str:
        """Name of the latest worker, or ''."""
        return self._worker.name if self._worker is not None else ""

    @property
    def failure(self) -> str:
        """The reason word of its failure, or ''."""
        return self._events.error

    @property
    def unplaced(self) -> int:
        """Sequences that wait for a worker. Read by the thread of the metrics, too."""
        if self._over or self._context.pace.paused:
            return 0
        runs = self._runs
        return sum(run.waits_for_worker for run in runs) if runs else self._item.sequences

    @property
    def requested(self) -> ItemRequest:
        return self._item

    @property
    def caller(self) -> str:
        return self._context.owner

    @property
    def batch_index(self) -> int:
        return self._item.batch_index

    @property
    def sequences(self) -> Sequence[SequenceRun]:
        """All sequences; empty before the first dispatch."""
        return self._runs

    @property
    def encoded(self) -> EncodedItem:
        return self._encoded

    @property
    def prompt_tokens(self) -> int:
        return len(self._encoded.token_ids)

    @property
    def generated_tokens(self) -> int:
        count = 0
        for run in self._runs:
            count += len(run.token_ids)
        return count

    @property
    def generated_ns(self) -> int:
        """Monotonic time of the last end of a sequence on a worker; `over_ns` if none ended there."""
        return max((run.ended_ns for run in self._runs), default=0) or self.over_ns

    def usage(self) -> pb.Usage:
        cached = [run.ending.cached_prompt_tokens for run in self._runs if run.ending is not None]
        return pb.Usage(
            prompt_tokens=len(self._encoded.token_ids),
            cached_prompt_tokens=max(cached, default=0),
            generated_tokens=self.generated_tokens,
        )

    @property
    def _settled(self) -> bool:
        for run in self._runs:
            if not run.over:
                return False
        return bool(self._runs)

    @property
    def _waiting(self) -> list[SequenceRun]:
        """Sequences to place."""
        if not self._runs:
            return []
        runs = [run for run in self._runs if run.assignment is None and run.waits_for_worker]
        return runs if self._handoffs is None else self._handoffs.without_worker(runs)

    @property
    def _may_be_placed(self) -> bool:
        return self._needs_worker and self._error is None and not self._context.pace.paused

    @property
    def _needs_worker(self) -> bool:
        if self._runs:
            return bool(self._waiting)
        return self._handoffs is None or not self._handoffs.awaits_prefill

    def open_sequences(self) -> None:
        """Opens all sequences, at the start or after the tokens received from another router."""
        self._runs = [self._open_sequence(index) for index in range(self._item.sequences)]

    def _open_sequence(self, sequence_index: int) -> SequenceRun:
        context, item = self._context, self._item
        run = SequenceRun(
            item,
            sequence_index,
            prompt=self._encoded.token_ids,
            request_id=context.request_id,
            model=context.model,
            times=SequenceTimes(context.arrival_time, context.latencies, context.trace_id),
            client=context.client,
            owner=self,
        )
        received = context.received.sequences.get((item.batch_index, sequence_index))
        if received is not None:
            run.resume_from(received)
        if context.bucket is not None:
            run.charge = Charge(context.bucket.spend, len(run.token_ids))
        if not run.over and (item.config.output.text or item.config.stopping.stop_texts):
            self._mesh.tokenizers.attach(run)
        return run

    async def _wait_for_worker(self, error: NoWorker | AdapterNotFound) -> None:
        final = await self._placer.wait(error, self._next_news(), self.generated_tokens)
        if final is None:
            return
        if not self._runs:
            raise final
        for run in self._waiting:
            run.end(pb.FINISH_REASON_ERROR, final, deliver=Delivery.ALL)

    def _dispatch(self, plan: Plan, waiting: Sequence[SequenceRun]) -> None:
        """Submits the item to the plan's worker; a handoff does so where the plan or the client asks for one."""
        if self._is_half:
            self._begun_handoffs().begin_half(plan, waiting)
        elif plan.first is plan.last:
            self.submit(plan.first, waiting)
        else:
            self._begun_handoffs().split(plan, waiting)

    def _begun_handoffs(self) -> ItemHandoffs:
        """The item's handoffs, from the first on."""
        if self._handoffs is None:
            self._handoffs = self._no_handoffs()
        return self._handoffs

    def _no_handoffs(self) -> ItemHandoffs:
        return ItemHandoffs(
            self,
            self._item,
            self._context.request_id,
            self._context.model,
            self._mesh.handoffs,
            self._placer,
            self._events.moved,
        )

    def submit(self, leg: Leg, runs: Sequence[SequenceRun], lease: Lease = NO_LEASE) -> None:
        """Submits sequences, or all of a fresh item. Raises TrtmeshError."""
        if not self._runs:
            self.open_sequences()
        taken = runs or self._runs
        self._placer.dispatch(leg, self._encoded, taken, lease)
        self._note_worker(leg.worker, taken, lease)

    def place_receiver(
        self, runs: Sequence[SequenceRun], sender: Worker, *, stays: bool, receiver: str = ""
    ) -> Leg:
        """Books a leg for a handoff's receiver. Raises as `Placer.place_receiver`."""
        return self._placer.place_receiver(
            self._encoded, runs, sender, stays=stays, receiver=receiver
        )

    def began_at(self, leg: Leg) -> None:
        """Notes the item's worker, and reports the start with the first."""
        self._placer.dispatched(leg)
        self._note_worker(leg.worker, self._runs, NO_LEASE)

    def _note_worker(self, worker: Worker, taken: Sequence[SequenceRun], lease: Lease) -> None:
        self._worker, self._able = worker, worker.capabilities
        context, config = self._context, self._item.config
        if self._receipt is not None:
            by_handoff = bool(lease.receiver or lease.state)
            self._receipt.took(worker, self._runs, taken, by_handoff=by_handoff)
        if self.queue_seconds is not None:
            return
        if self._encoded.adapter is not None:
            self._mesh.adapters.dispatched(self._encoded.adapter, hit=not self._delivered)
        self.queue_seconds = self._loop.time() - context.arrival_time
        self._events.started(
            worker,
            self._seed,
            self._encoded.token_ids,
            self.queue_seconds,
            with_prompt=not config.output.exclude_prompt,
        )

    def on_settled(self, run: SequenceRun) -> None:
        """Reports the end of a sequence; wakes the item after the last sequence or a failure."""
        try:
            self._settle(run)
        except Exception as defect:  # noqa: BLE001 - raised again where it ends this item alone
            self._error = defect
            self.wake()

    def _settle(self, run: SequenceRun) -> None:
        if self._handoffs is not None:
            self._handoffs.on_settled(run)
        if run.error is None:
            state = state_of(run, self._encoded, self.worker) if self._is_half else None
            self._events.sequence_finished(run, state)
        else:
            self._error = run.error
        if self._error is not None:
            self.wake()
        elif self._settled:
            self.over_ns = time.monotonic_ns()
            if (
                self.stage == "generate"
                and self._handoffs is None
                and self._context.running.enter()
            ):
                # So the end leaves with the last tokens.
                self._finish()
                self._abandon()
            self.wake()

    def on_pace(self) -> None:
        """Pauses or continues the item with the client. Beams are not paused, since they would restart."""
        if self._over or self._stop_asked:
            return
        if self._context.pace.paused and self._item.config.beam_search.beam_width == 1:
            if without_kv := self._begun_handoffs().park(self._runs):
                self._move(without_kv, "paused")
        else:
            self.wake()

    def migrate(self, runs: Sequence[SequenceRun], address: str, error: TrtmeshError) -> bool:
        """Leaves a suspect or draining worker if another has room; else stays, since late tokens still count."""
        if self._stop_asked or self._over:
            return False
        if not self._placer.has_place(self._encoded, self._runs, address, error):
            return False
        self._move(runs, "moved", error, error)
        if self._handoffs is not None:
            self._handoffs.fail(runs, address, error)
        return True

    def leave_workers(self, cause: str) -> tuple[int, int]:
        """Migrates the running sequences. Returns how many leave now, and how many stay."""
        placed: dict[str, list[SequenceRun]] = {}
        for run in self._runs:
            if run.assignment is not None and not run.over:
                placed.setdefault(run.address, []).append(run)
        moved = sum(
            len(runs)
            for address, runs in placed.items()
            if self.migrate(runs, address, Draining(f"the worker at {address} is left: {cause}"))
        )
        return moved, sum(map(len, placed.values())) - moved

    def hedge(self, race: Race, left_out: Mapping[str, str]) -> str:
        """Starts the second copy of a race on a worker that is not left out; returns why it does not, or ''."""
        run, output = race.run, self._item.config.output
        if self._over or self._stop_asked or self._context.pace.paused:
            return "the item ends, or waits for its client"
        if run.is_beam or self._is_half:
            return "beams and halves of items have no second copy"
        if self._handoffs is not None and self._handoffs.holds(run):
            return "its KV is on the way to another worker"
        if not run.token_ids and (output.prompt_log_probs or output.context_logits):
            return "data of its prompt comes from a single worker"
        leg = self._placer.place_copy(self._encoded, run, left_out)
        if leg is None:
            return "no other worker has room, its adapter, or sequences as long"
        try:
            race.begin(leg, lambda at, copy: self._placer.submit_copy(at, self._encoded, copy))
        except TrtmeshError as error:
            return error.message
        return ""

    def switched(
        self, run: SequenceRun, address: str, worker: Worker, lost: TrtmeshError | None
    ) -> None:
        """A sequence goes on at `worker` with its second copy: the one at `address` was `lost`, or is behind."""
        if self._trace is not None:
            self._trace.switched(run, lost)
        self._events.moved(1, "hedged", lost)
        self._note_worker(worker, [run], NO_LEASE)
        if lost is not None:
            self.note_absence(address, lost)
        if lost is not None and not self._placer.lost(address, lost, self.generated_tokens):
            self.fail(too_many_losses(self._placer.attempts.fruitless, lost))

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        """Continues a lost sequence elsewhere, unless too many workers were lost with the item."""
        if self._stop_asked:
            run.end(pb.FINISH_REASON_STOPPED, deliver=Delivery.ALL)
            return
        self.note_absence(address, error)
        placer, counts = self._placer, not isinstance(error, HandoffFailed)
        if counts and not placer.lost(address, error, self.generated_tokens):
            last = too_many_losses(placer.attempts.fruitless, error)
            run.end(pb.FINISH_REASON_ERROR, last, deliver=Delivery.ALL)
            return
        if self._handoffs is not None:
            self._handoffs.fail([run], address, error)
        told = error if placer.is_news(address, error) else None
        self._move([run], error.reason.lower(), error, told)

    def copy_dropped(self, run: SequenceRun, outcome: str) -> None:
        """The second copy of a sequence was stopped."""
        if self._trace is not None:
            self._trace.dropped(run, outcome)

    def note_absence(self, address: str, error: TrtmeshError) -> None:
        """Notes that the worker at `address` lacks the item's adapter, if that is the `error`."""
        worker, adapter = self._mesh.fleet.workers.get(address), self._encoded.identity
        if isinstance(error, AdapterNotFound) and adapter is not None and worker is not None:
            worker.forget_adapter(adapter)

    def _move(
        self,
        runs: Sequence[SequenceRun],
        cause: str,
        error: TrtmeshError | None = None,
        told: TrtmeshError | None = None,
    ) -> None:
        """Takes sequences off their workers and wakes the item, to place them again with all tokens; logs `told`."""
        if self._trace is not None:
            self._trace.left(runs, cause, error)
        for run in runs:
            run.leave_worker(error)
        self._events.moved(len(runs), cause, told)
        self.wake()

    def hand_over(
        self, runs: Sequence[SequenceRun], address: str, cause: str
    ) -> Sequence[SequenceRun]:
        """Begins to move sequences with the KV. Returns the sequences that cannot move so."""
        if self._stop_asked or self._over:
            return ()
        return self._begun_handoffs().hand_over(runs, address, cause)

    def may_move(self, run: SequenceRun) -> bool:
        """Whether a running sequence could move now, with its KV."""
        if self._stop_asked or self._over:
            return False
        # A look begins none: an item without handoffs ends sooner.
        return (self._handoffs or self._no_handoffs()).may_move(run)

    @property
    def is_moving(self) -> bool:
        """Whether a sequence moves to another worker now."""
        return self._handoffs is not None and self._handoffs.is_moving

    def move_to(self, run: SequenceRun, receiver: str) -> bool:
        """Begins to move a sequence with its KV to the worker at an address; False if it stays."""
        return not (self._stop_asked or self._over) and self._begun_handoffs().move_to(
            run, receiver
        )

    def continues(self, run: SequenceRun) -> bool:
        """Whether a handed over sequence continues: not a first half that a client asked for."""
        return not self._is_half

    def on_handed_over(self, run: SequenceRun, end: End) -> None:
        """Passes a sequence on to the receiver, or keeps the sequence for the return of the client."""
        if self._trace is not None:
            self._trace.left([run], "handed over", None)
        if self._stop_asked:
            run.end(pb.FINISH_REASON_STOPPED, deliver=Delivery.ALL)
        elif self._handoffs is not None:
            self._handoffs.on_handed_over(run, end)
        self.wake()

    def fail(self, error: TrtmeshError) -> None:
        """Ends the item with an error from outside of its task."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Has the item look at its state again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _cancelled(self) -> None:
        """Ends an item stopped before the dispatch, or without a client."""
        reason = pb.FINISH_REASON_STOPPED if self._stop_asked else pb.FINISH_REASON_CANCELLED
        if self._stop_asked and not self._runs and self._resumed:
            # Resumed output ends at the last received token.
            self.open_sequences()
        self._events.ended_early(self._runs, reason, self.usage())


class TracedItemRun(ItemRun):
    """An item whose trace is told each stage. All others are spared a call for each."""

    _trace: ItemTrace

    @property
    def stage(self) -> str:
        return self._stage

    @stage.setter
    def stage(self, stage: str) -> None:
        self._stage = stage
        self._trace.enters(stage)
