"""One item, from admission to its terminal event. This file tells the story; every verb is a method below.

* A permit, taken when its request was admitted, is held for exactly as long as the item lives.
* Every item ends in one terminal event, whatever happens to its siblings.
* When a tokenizer finds a stop text, the worker is told to stop.
* Whoever stops waiting for an item stops its sequences, so that the worker computes nothing that nobody reads.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import InternalError, PromptEmpty, TrtmeshError, to_proto
from trtmesh.chassis.logs import request_id_bound
from trtmesh.router.placement import PlacementQuery
from trtmesh.router.request import ItemRequest, worker_config
from trtmesh.router.sequence import SequenceRun
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb

if TYPE_CHECKING:
    from trtmesh.router.requests import LiveRequest
    from trtmesh.router.worker import Worker

log = logging.getLogger(__name__)


class ItemRun:
    """One live item."""

    def __init__(self, live: LiveRequest, item: ItemRequest) -> None:
        self._live = live
        self._mesh = live.mesh
        self._item = item
        self._stop_asked = False
        self._over = False
        self._token_ids: list[int] = []
        self._words: list[tuple[int, ...]] = []
        self._runs: list[SequenceRun] = []
        self._settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self.stage = "admit"
        self.worker = ""

    async def live(self) -> None:
        """Admit → encode → place → generate → finish."""
        self._task = asyncio.current_task()
        with request_id_bound(self._live.request_id):
            try:
                if self._stop_asked:
                    raise asyncio.CancelledError
                await self._encode()
                worker = self._place()
                await self._generate(worker)
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
                run.stop_worker(pb.FINISH_REASON_STOPPED)
        else:
            self._task.cancel()
        return True

    @property
    def batch_index(self) -> int:
        return self._item.batch_index

    @property
    def prompt_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def generated_tokens(self) -> int:
        return sum(len(run.token_ids) for run in self._runs)

    async def _encode(self) -> None:
        """Texts to ids, all in one exchange with a tokenizer; ids need none."""
        self.stage = "encode"
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

    def _place(self) -> Worker:
        """The worker that gets the item."""
        self.stage = "place"
        query = PlacementQuery(self._live.model, self._item.worker_fields)
        worker = self._mesh.fleet.place(query)
        self.worker = worker.name
        return worker

    async def _generate(self, worker: Worker) -> None:
        """Dispatches the item and waits until all its sequences are settled. Tokens flow beside this coroutine."""
        self.stage = "generate"
        self._dispatch(worker)
        await self._settled
        error = next((run.error for run in self._runs if run.error is not None), None)
        if error is not None:
            raise error

    def _dispatch(self, worker: Worker) -> None:
        self._runs = [self._open_sequence(index) for index in range(self._item.config.sequences)]
        seed = self._item.config.sampling.seed
        if seed is None:
            seed = self._live.drawn_seed
        vocabulary_size = (
            self._mesh.tokenizers.vocabulary_size(self._live.model)
            if self._item.config.sampling.embedding_bias_texts
            else 0
        )
        command = engine_pb.SubmitCommand(
            request_id=self._live.request_id,
            batch_index=self._item.batch_index,
            token_ids=self._token_ids,
            config=worker_config(self._item, self._words, vocabulary_size, seed),
            timeout_ms=self._live.remaining_ms(),
        )
        worker.submit(self._runs, command)
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

    def _open_sequence(self, sequence_index: int) -> SequenceRun:
        run = SequenceRun(
            self._item,
            sequence_index,
            request_id=self._live.request_id,
            model=self._live.model,
            arrival_time=self._live.arrival_time,
            client=self._live.client,
            settled=self._on_settled,
        )
        if self._item.config.output.text or self._item.config.stopping.stop_texts:
            self._mesh.tokenizers.attach(run)
        return run

    def _on_settled(self, run: SequenceRun) -> None:
        """A sequence is over: tells the client, and wakes the item when it was the last or it failed."""
        if run.error is None:
            self._put_sequence_finished(run)
        if (run.error is not None or all(run.over for run in self._runs)) and (
            not self._settled.done()
        ):
            self._settled.set_result(None)

    def _put_sequence_finished(self, run: SequenceRun) -> None:
        finished = router_pb.SequenceFinished(
            reason=run.reason, generated_tokens=len(run.token_ids), stop_text=run.stop_text
        )
        if run.end is not None and run.stop_text is None:
            finished.stop_token_ids.extend(run.end.stop_token_ids)
            if run.end.HasField("handoff"):
                finished.handoff_state = run.end.handoff.SerializeToString()
            if run.end.HasField("cumulative_log_prob"):
                finished.cumulative_log_prob = run.end.cumulative_log_prob
        event = router_pb.GenerateEvent(
            sequence_index=run.sequence_index, sequence_finished=finished
        )
        self._put(event)

    def _finish(self) -> None:
        reason = self._runs[-1].reason
        finished = router_pb.ItemFinished(reason=reason, usage=self._usage())
        for run in self._runs:
            if run.end is not None and run.end.HasField("perf_metrics"):
                finished.perf_metrics.CopyFrom(run.end.perf_metrics)
        self._put(router_pb.GenerateEvent(item_finished=finished))
        self._mesh.metrics.finished[reason] += 1
        self._mesh.metrics.generated_tokens.observe(self.generated_tokens)

    def _fail(self, error: TrtmeshError) -> None:
        failed = router_pb.ItemFailed(error=to_proto(error), usage=self._usage())
        self._put(router_pb.GenerateEvent(item_failed=failed))
        self._mesh.metrics.failed[error.reason] += 1
        log.info("item %d failed: %s: %s", self._item.batch_index, error.reason, error.message)

    def _cancelled(self) -> None:
        """Cancelled by `stop` before it was dispatched, or because the client is gone."""
        reason = pb.FINISH_REASON_STOPPED if self._stop_asked else pb.FINISH_REASON_CANCELLED
        finished = router_pb.ItemFinished(reason=reason, usage=self._usage())
        self._put(router_pb.GenerateEvent(item_finished=finished))
        self._mesh.metrics.finished[reason] += 1

    def _abandon(self) -> None:
        """Stops whatever still runs; nothing to do for an item that came to its end."""
        for run in self._runs:
            run.abandon(pb.FINISH_REASON_CANCELLED)
        self._over = True
        self._live.on_item_over()

    def _usage(self) -> pb.Usage:
        ends = [run.end for run in self._runs if run.end is not None]
        return pb.Usage(
            prompt_tokens=len(self._token_ids),
            cached_prompt_tokens=max((end.cached_prompt_tokens for end in ends), default=0),
            generated_tokens=self.generated_tokens,
        )

    def _put(self, event: router_pb.GenerateEvent) -> None:
        event.batch_index = self._item.batch_index
        self._live.client.put(event)
