"""Puts an item's events other than tokens, with their metrics and logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import InternalError, TrtmeshError, forget_frames
from trtmesh.chassis.logs import caller_bound, request_id_bound
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.requests.context import RequestContext
from trtmesh.router.streams.sequence import Delivery, SequenceRun
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2 as receipt_pb
from trtmesh.v1 import router_pb2 as router_pb

log = logging.getLogger(__name__)

SUMMED_METRICS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
EARLIEST_METRICS = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")


class ItemEvents:
    """Events of an item, written in place: a message given to another one's constructor is serialized and parsed.

    Losses are reported from the tasks of workers, so their log lines bind owner and request id here.
    """

    def __init__(self, batch_index: int, context: RequestContext) -> None:
        self._batch_index = batch_index
        self._owner = context.owner
        self._request_id, self._trace_id = context.request_id, context.trace_id
        self._client = context.client
        self._metrics = context.mesh.metrics
        self._of_model = self._metrics.models[context.model]
        self.error = ""
        """Reason word of the failure."""
        self.reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
        """Of an end without failure."""
        self._over = False

    def started(
        self,
        worker: Worker,
        seed: int,
        token_ids: Sequence[int],
        queue_seconds: float,
        *,
        with_prompt: bool,
    ) -> None:
        self._of_model.tokens_in += len(token_ids)
        self._of_model.queue.observe(queue_seconds, trace_id=self._trace_id)
        self._of_model.prompt_tokens.observe(len(token_ids))
        event = router_pb.GenerateEvent(batch_index=self._batch_index)
        started = event.item_started
        started.seed, started.prompt_tokens, started.worker = seed, len(token_ids), worker.name
        if with_prompt:
            started.prompt_token_ids.extend(token_ids)
        self._client.announce(event)

    def sequence_finished(self, run: SequenceRun, state: bytes | None = None) -> None:
        """A sequence ended; `state` is that of a first half."""
        if run.times.longest_gap:
            self._of_model.stall.observe(run.times.longest_gap)
        event = router_pb.GenerateEvent(
            batch_index=self._batch_index, sequence_index=run.sequence_index
        )
        finished = event.sequence_finished
        finished.reason, finished.generated_tokens = run.reason, len(run.token_ids)
        if run.stop_text is not None:
            finished.stop_text = run.stop_text
        if state is not None:
            finished.handoff_state = state
        if (log_prob := run.cumulative_log_prob) is not None:
            finished.cumulative_log_prob = log_prob
        if run.ending is not None:
            if run.stop_text is None:
                finished.stop_token_ids.extend(run.ending.stop_token_ids)
            if run.ending.perf_metrics is not None:
                finished.perf_metrics.CopyFrom(run.ending.perf_metrics)
        self._client.put(event)

    def finished(
        self,
        runs: Sequence[SequenceRun],
        usage: pb.Usage,
        receipt: receipt_pb.SignedReceipt | None,
    ) -> None:
        self._put_finished(runs[-1].reason, usage, _metrics_of(runs), receipt)
        self._of_model.generated_tokens.observe(usage.generated_tokens)
        for run in runs:
            run.times.on_finished(len(run.token_ids))

    def ended_early(
        self, runs: Sequence[SequenceRun], reason: pb.FinishReason.ValueType, usage: pb.Usage
    ) -> None:
        """The item was stopped before the dispatch, or the client left."""
        for run in runs:
            if not run.over:
                run.end(reason, deliver=Delivery.NOTHING)
                self.sequence_finished(run)
        self._put_finished(reason, usage, None)

    def moved(self, sequences: int, cause: str, error: TrtmeshError | None) -> None:
        """Sequences left their worker, because of `error` unless that is known or their client slow."""
        self._metrics.moved[cause] += sequences
        if error is not None:
            with request_id_bound(self._request_id), caller_bound(self._owner):
                log.info("item %d moves (%s): %s", self._batch_index, cause, error.message)

    def broke(self, defect: Exception, usage: pb.Usage) -> None:
        """The item met a defect of this software, maybe after its end."""
        log.error("unexpected error in item %d", self._batch_index, exc_info=defect)
        forget_frames(defect)
        if not self._over:
            self.failed(InternalError(f"{type(defect).__name__}: {defect}"), usage)

    def failed(self, error: TrtmeshError, usage: pb.Usage) -> None:
        self.error = error.reason
        failed = router_pb.ItemFailed(error=to_proto(error), usage=usage)
        self._metrics.note_item(self._owner, usage.prompt_tokens, usage.generated_tokens)
        event = router_pb.GenerateEvent(batch_index=self._batch_index, item_failed=failed)
        self._client.put(event)
        self._over = True
        self._of_model.failed[error.reason] += 1
        log.info("item %d failed: %s: %s", self._batch_index, error.reason, error.message)
        forget_frames(error)

    def _put_finished(
        self,
        reason: pb.FinishReason.ValueType,
        usage: pb.Usage,
        perf_metrics: pb.PerfMetrics | None,
        receipt: receipt_pb.SignedReceipt | None = None,
    ) -> None:
        self._metrics.note_item(self._owner, usage.prompt_tokens, usage.generated_tokens)
        event = router_pb.GenerateEvent(batch_index=self._batch_index)
        finished = event.item_finished
        finished.reason = self.reason = reason
        finished.usage.CopyFrom(usage)
        if perf_metrics is not None:
            finished.perf_metrics.CopyFrom(perf_metrics)
        if receipt is not None:
            finished.receipt.CopyFrom(receipt)
        self._client.put(event)
        self._over = True
        self._of_model.finished[reason] += 1


def _metrics_of(runs: Sequence[SequenceRun]) -> pb.PerfMetrics | None:
    """The metrics of all sequences together. Beams share the metrics of their search."""
    each = [
        run.ending.perf_metrics
        for run in runs
        if run.ending is not None and run.ending.perf_metrics is not None
    ]
    return combined(each[:1] if runs[0].is_beam else each) if each else None


def combined(metrics: Sequence[pb.PerfMetrics]) -> pb.PerfMetrics | None:
    """The first times, the last time and the sums; None for no metrics. A time of 0 is not known."""
    if not metrics:
        return None
    whole = pb.PerfMetrics(last_token_time_ns=max(each.last_token_time_ns for each in metrics))
    for name in EARLIEST_METRICS:
        known = [getattr(each, name) for each in metrics if getattr(each, name)]
        setattr(whole, name, min(known, default=0))
    for name in SUMMED_METRICS:
        setattr(whole, name, sum(getattr(each, name) for each in metrics))
    if whole.total_draft_tokens:
        whole.acceptance_rate = whole.total_accepted_draft_tokens / whole.total_draft_tokens
    return whole
