"""One item, from admission to its terminal event. This file tells the story; every verb is a method below.

* A permit, taken when its request came, is held for exactly as long as the item lives.
* Every item ends in one terminal event, whatever happens to its siblings.
* When a tokenizer finds a stop text, the worker is told to stop.
* A worker that is lost or full costs an item nothing but time: whatever was generated goes along to the next one.
* Whoever stops waiting for an item stops its sequences, so that the worker computes nothing that nobody reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import (
    InternalError,
    NoWorker,
    PromptEmpty,
    TrtmeshError,
    WorkerLost,
    to_proto,
)
from trtmesh.chassis.logs import request_id_bound
from trtmesh.router.admission import Permit
from trtmesh.router.attempts import Attempts
from trtmesh.router.dispatch import submits
from trtmesh.router.fleet import Identity, ItemToPlace, Placed
from trtmesh.router.kv_index import PromptBlocks, prefix_root
from trtmesh.router.request import ItemRequest, worker_config
from trtmesh.router.resumption import NOTHING, Received
from trtmesh.router.sequence import SequenceRun
from trtmesh.router.siblings import Seat
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb

if TYPE_CHECKING:
    from trtmesh.router.requests import LiveRequest
    from trtmesh.router.worker import Worker

log = logging.getLogger(__name__)

REPEAT_SECONDS = 0.1
"""Pause before the workers that did not take an item are asked again."""


class ItemRun:
    """One live item."""

    def __init__(
        self, live: LiveRequest, item: ItemRequest, permit: Permit, received: Received = NOTHING
    ) -> None:
        self._permit = permit
        self._live = live
        self._mesh = live.mesh
        self._item = item
        self._received = received
        self._stop_asked = False
        self._over = False
        self._token_ids: list[int] = []
        self._blocks = PromptBlocks(None, ())
        self._seat: Seat | None = None
        self._placed: Placed | None = None
        self._words: list[tuple[int, ...]] = []
        self._runs: list[SequenceRun] = []
        self._attempts = Attempts(live.mesh.retry.most_attempts)
        self._identity: Identity | None = None
        self._error: TrtmeshError | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stage = "admit"
        self.worker = ""

    async def live(self) -> None:
        """Admit → encode → meet siblings → place and generate, on as many workers as it takes → finish."""
        self._task = asyncio.current_task()
        with request_id_bound(self._live.request_id):
            try:
                if self._stop_asked:
                    raise asyncio.CancelledError
                await self._permit.admitted(self._item.config.priority)
                await self._encode()
                await self._meet_siblings()
                self._go_on_behind_received()
                while not self._settled:
                    await self._place()
                    await self._generate()
                self._finish()
            except TrtmeshError as error:
                self._fail(error)
            except asyncio.CancelledError:
                self._cancelled()
            except Exception as error:
                # Broad on purpose: a defect met by one item must end that item alone, and visibly.
                log.exception("item %d failed for an unforeseen reason", self._item.batch_index)
                self._fail(InternalError(f"{type(error).__name__}: {error}"))
            finally:
                self._abandon()

    def stop(self) -> bool:
        """Ends the item early; whatever was generated is delivered. False when it is over."""
        if self._over:
            return False
        self._stop_asked = True
        if self._task is None:
            # Its first step sees what was asked.
            return True
        if self._runs:
            for run in self._runs:
                run.stop(pb.FINISH_REASON_STOPPED)
        else:
            self._task.cancel()
        return True

    @property
    def batch_index(self) -> int:
        return self._item.batch_index

    @property
    def sequences(self) -> Sequence[SequenceRun]:
        """Its sequences; none before a worker took it."""
        return self._runs

    @property
    def prompt_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def generated_tokens(self) -> int:
        return sum(len(run.token_ids) for run in self._runs)

    def _record(self) -> None:
        """Writes down what came and where it went first, where that is recorded."""
        if self._mesh.recorder is not None and self._placed is not None:
            block_tokens = self._placed.worker.engine.tokens_per_block
            self._mesh.recorder.note(
                self._placed.record,
                model=self._live.model,
                arrival_time=self._live.arrival_time,
                block_tokens=block_tokens or 1,
                hashes=self._blocks.hashes(block_tokens),
                new_tokens=self.generated_tokens,
            )

    def _spend(self, tokens: int) -> None:
        """Takes tokens from those that the caller's API key may use."""
        now = asyncio.get_running_loop().time()
        self._mesh.rate_limiter.spend(self._live.api_key, tokens, now)

    def usage(self) -> pb.Usage:
        """What it consumed so far."""
        ends = [run.end for run in self._runs if run.end is not None]
        return pb.Usage(
            prompt_tokens=len(self._token_ids),
            cached_prompt_tokens=max((end.cached_prompt_tokens for end in ends), default=0),
            generated_tokens=self.generated_tokens,
        )

    async def _encode(self) -> None:
        """Texts to ids, all in one exchange with a tokenizer; ids need none."""
        self.stage = "encode"
        # What no worker can do costs no tokenizer anything.
        self._mesh.fleet.check_fields(self._live.model, self._item.worker_fields)
        prompt, words = self._item.prompt, self._item.words
        self._token_ids = list(prompt.token_ids or ())
        if prompt.text is not None or words:
            command = tokenizer_pb.EncodeCommand(
                request_id=self._live.request_id,
                text=prompt.text,
                add_special_tokens=prompt.add_special_tokens,
                words=words,
            )
            encoded = await self._mesh.tokenizers.encode(self._live.model, command)
            self._words = [tuple(word.ids) for word in encoded.words]
            if prompt.text is not None:
                self._token_ids = list(encoded.token_ids)
        if not self._token_ids:
            raise PromptEmpty("the prompt has no tokens; send at least one token or character")
        self._spend(len(self._token_ids))
        self._blocks = PromptBlocks(prefix_root(self._item.config), self._token_ids)

    def _go_on_behind_received(self) -> None:
        """Opens the sequences of an item that began on another router; others are opened when they are placed."""
        if any(batch_index == self.batch_index for batch_index, _ in self._received.sequences):
            self._open_sequences()

    @property
    def _settled(self) -> bool:
        return bool(self._runs) and all(run.over for run in self._runs)

    @property
    def _waiting(self) -> list[SequenceRun]:
        """Sequences that no worker has."""
        return [run for run in self._runs if run.waits_for_worker]

    async def _meet_siblings(self) -> None:
        """Lets the first of the items that begin alike compute what they share before the others go."""
        self.stage = "place"
        self._seat = self._mesh.fleet.seat(self._live.siblings, self._live.model, self._blocks)
        if self._seat is not None:
            await self._seat.wait()

    async def _place(self) -> None:
        """Dispatches what no worker has, and waits for a worker where none takes it."""
        deadline: float | None = None
        while not self._runs or self._waiting:
            self.stage = "place"
            try:
                placed = self._mesh.fleet.place(self._to_place())
            except NoWorker as error:
                now = asyncio.get_running_loop().time()
                deadline = deadline or now + self._mesh.retry.recovery_seconds
                await self._wait_for_worker(deadline - now, error)
            else:
                self._placed = self._placed or placed
                with placed:
                    self._dispatch(placed)
                    if self._seat is not None:
                        self._seat.dispatched(placed.worker.address, placed.booking)

    def move(self, runs: Sequence[SequenceRun], address: str, why: str) -> bool:
        """Takes sequences away from a worker that is suspected of being dead, or shall be, if another one takes them.

        They stay where none does: the worker may be well, and whatever it still generates is wanted.
        """
        item = self._to_place()
        item = replace(item, exclude={**item.exclude, address: why})
        if self._stop_asked or self._over or not self._mesh.fleet.has_place(item):
            return False
        self._attempts.leave_out(address, WorkerLost(why))
        for run in runs:
            run.release()
        self._mesh.metrics.moved["moved"] += len(runs)
        log.info("item %d moves: %s", self.batch_index, why)
        self._news.set()
        return True

    def _to_place(self) -> ItemToPlace:
        exclude = {address: e.message for address, e in self._attempts.failures.items()}
        if self._identity is not None:
            for address in self._mesh.fleet.others_than(self._identity):
                exclude[address] = "its model or tokenizer is not the one that the item began with"
        generated = max((run.token_ids for run in self._waiting), key=len, default=[])
        return ItemToPlace(
            request_id=self._live.request_id,
            batch_index=self.batch_index,
            model=self._live.model,
            fields=self._item.worker_fields,
            prompt_tokens=len(self._token_ids) + len(generated),
            blocks=self._blocks,
            sequences=len(self._waiting) or self._item.config.sequences,
            max_tokens=self._item.config.stopping.max_tokens,
            exclude=exclude,
            avoid=self._seat.avoid if self._seat else frozenset(),
            prefer=self._seat.prefer if self._seat else "",
            cause="migration" if generated else "retry" if self._runs else "first",
        )

    async def _wait_for_worker(self, seconds_left: float, error: NoWorker) -> None:
        """Returns when it is worth trying again; ends the item when it is not."""
        refusal = self._attempts.back_pressure
        if refusal is not None and not self.generated_tokens:
            # All are full: the client hears it at once and may go to another mesh.
            self._give_up(refusal)
            return
        if seconds_left <= 0 or not self._mesh.fleet.hopeful:
            self._give_up(_nobody_goes_on(self._attempts.loss, error))
            return
        left_out = bool(self._attempts.failures)
        self._attempts.forgive()
        pause = min(seconds_left, REPEAT_SECONDS) if left_out else seconds_left
        await self._mesh.fleet.change(pause)

    def _give_up(self, error: TrtmeshError) -> None:
        """No worker takes the item: it ends behind what was generated."""
        if not self._runs:
            raise error
        for run in self._waiting:
            run.give_up(error)

    async def _generate(self) -> None:
        """Waits until all sequences are over, one failed, or one needs another worker. Tokens flow beside this."""
        self.stage = "generate"
        while not self._settled and not self._waiting and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error

    def _dispatch(self, placed: Placed) -> None:
        """Gives the worker what no worker has."""
        worker, first = placed.worker, self._identity is None
        if first:
            if not self._runs:
                self._open_sequences()
            self._identity = Identity.of(worker)
        self.worker = worker.name
        config = self._worker_config()
        for runs, command in submits(
            self._item,
            self._waiting,
            self._token_ids,
            config,
            request_id=self._live.request_id,
            timeout_ms=self._live.remaining_ms(),
        ):
            worker.submit(runs, command, placed.booking)
        if first:
            self._put_started(worker, config.sampling.seed)

    def _worker_config(self) -> pb.GenerationConfig:
        seed = self._item.config.sampling.seed
        if seed is None:
            seed = self._live.drawn_seed
        return worker_config(self._item, self._words, seed)

    def _put_started(self, worker: Worker, seed: int) -> None:
        self._mesh.metrics.tokens_in += len(self._token_ids)
        self._mesh.metrics.queue.observe(self._live.age_seconds())
        self._mesh.metrics.prompt_tokens.observe(len(self._token_ids))
        echo = () if self._item.config.output.exclude_prompt else self._token_ids
        started = router_pb.ItemStarted(
            seed=seed,
            prompt_tokens=len(self._token_ids),
            worker=worker.name,
            prompt_token_ids=echo,
        )
        self._put(router_pb.GenerateEvent(item_started=started))

    def _open_sequences(self) -> None:
        self._runs = [self._open_sequence(index) for index in range(self._item.config.sequences)]

    def _open_sequence(self, sequence_index: int) -> SequenceRun:
        run = SequenceRun(
            self._item,
            sequence_index,
            request_id=self._live.request_id,
            model=self._live.model,
            arrival_time=self._live.arrival_time,
            client=self._live.client,
            owner=self,
        )
        received = self._received.sequences.get((self.batch_index, sequence_index))
        if received is not None:
            run.go_on_behind(received)
        if run.over:
            return run
        if self._item.config.output.text or self._item.config.stopping.stop_texts:
            self._mesh.tokenizers.attach(run)
        return run

    def on_settled(self, run: SequenceRun) -> None:
        """A sequence is over: tells the client, and wakes the item when it was the last or it failed."""
        if run.error is None:
            self._put_sequence_finished(run)
        else:
            self._error = run.error
        if self._error is not None or self._settled:
            self._news.set()

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        """A worker does not go on with a sequence: another one shall, unless too many were lost with this item."""
        if self._stop_asked:
            run.stop(pb.FINISH_REASON_STOPPED)
        elif not self._attempts.note(address, error, self.generated_tokens):
            run.give_up(_too_many_losses(self._attempts.fruitless, error))
        else:
            self._mesh.metrics.moved[error.reason.lower()] += 1
            log.info("item %d looks for another worker: %s", self.batch_index, error.message)
            self._news.set()

    def _put_sequence_finished(self, run: SequenceRun) -> None:
        finished = router_pb.SequenceFinished(
            reason=run.reason, generated_tokens=len(run.token_ids), stop_text=run.stop_text
        )
        if run.end is not None and run.stop_text is None:
            finished.stop_token_ids.extend(run.end.stop_token_ids)
            if run.end.HasField("handoff"):
                finished.handoff_state = run.end.handoff.SerializeToString()
            if (log_prob := run.cumulative_log_prob) is not None:
                finished.cumulative_log_prob = log_prob
        event = router_pb.GenerateEvent(
            sequence_index=run.sequence_index, sequence_finished=finished
        )
        self._put(event)

    def _finish(self) -> None:
        reason = self._runs[-1].reason
        finished = router_pb.ItemFinished(reason=reason, usage=self.usage())
        for run in self._runs:
            if run.end is not None and run.end.HasField("perf_metrics"):
                finished.perf_metrics.CopyFrom(run.end.perf_metrics)
        self._put(router_pb.GenerateEvent(item_finished=finished))
        self._mesh.metrics.finished[reason] += 1
        self._mesh.metrics.generated_tokens.observe(self.generated_tokens)
        self._mesh.fleet.learn_new_tokens(self.generated_tokens)

    def _fail(self, error: TrtmeshError) -> None:
        failed = router_pb.ItemFailed(error=to_proto(error), usage=self.usage())
        self._put(router_pb.GenerateEvent(item_failed=failed))
        self._mesh.metrics.failed[error.reason] += 1
        log.info("item %d failed: %s: %s", self._item.batch_index, error.reason, error.message)

    def _cancelled(self) -> None:
        """Cancelled by `stop` before it was dispatched, or because the client is gone."""
        reason = pb.FINISH_REASON_STOPPED if self._stop_asked else pb.FINISH_REASON_CANCELLED
        finished = router_pb.ItemFinished(reason=reason, usage=self.usage())
        self._put(router_pb.GenerateEvent(item_finished=finished))
        self._mesh.metrics.finished[reason] += 1

    def _abandon(self) -> None:
        """Stops whatever still runs; nothing to do for an item that came to its end."""
        for run in self._runs:
            run.abandon(pb.FINISH_REASON_CANCELLED)
        self._spend(self.generated_tokens)
        self._record()
        if self._seat is not None:
            self._seat.close()
        self._over = True
        self.stage = "over"
        self._live.on_item_over()

    def _put(self, event: router_pb.GenerateEvent) -> None:
        event.batch_index = self._item.batch_index
        self._live.client.put(event)


def _too_many_losses(losses: int, error: TrtmeshError) -> WorkerLost:
    return WorkerLost(
        f"{losses} workers in a row were lost with this item (max_attempts), the last one so: {error.message}",
        worker=error.worker,
    )


def _nobody_goes_on(loss: TrtmeshError | None, error: NoWorker) -> TrtmeshError:
    if loss is None:
        return error
    return WorkerLost(
        f"{loss.message}; and nobody went on with the item: {error.message}",
        worker=loss.worker,
        retry_after_ms=error.retry_after_ms,
    )
