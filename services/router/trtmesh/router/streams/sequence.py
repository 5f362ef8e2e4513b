"""A generated sequence on the way from a worker through a tokenizer to the client."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.frozen import frozen
from trtmesh.router.links.contract import ContractBroken
from trtmesh.router.metrics import Latencies, ModelMetrics
from trtmesh.router.streams.client_stream import MOST_MESSAGE_BYTES
from trtmesh.router.streams.details import TokenDetailBuffer, unheard
from trtmesh.router.tokenizers.decoding import DecodedSequence, TextOptions
from trtmesh.router.values.request import ItemRequest
from trtmesh.router.values.resumption import ReceivedSequence
from trtmesh.v1 import engine_pb2 as worker_pb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb
from trtmesh.v1 import router_pb2 as router_pb


class Reader(Protocol):
    """The client of a sequence."""

    def put(self, event: router_pb.GenerateEvent) -> None:
        """Takes an event other than tokens."""

    def put_tokens(
        self,
        batch_index: int,
        sequence_index: int,
        token_offset: int,
        token_ids: list[int],
        text: str,
        details: pb.TokenDetails | None,
    ) -> None:
        """Takes new tokens, or a restart from offset 0, and the list of the ids with them."""


class SequenceWriter:
    """The output of a sequence in the requested form."""

    __slots__ = (
        "_batch_index",
        "_client",
        "_details",
        "_held_texts",
        "_prompt_told",
        "_sequence_index",
        "_wants_text",
    )

    def __init__(self, item: ItemRequest, sequence_index: int, client: Reader) -> None:
        output = item.config.output
        self._batch_index = item.batch_index
        self._sequence_index = sequence_index
        self._client = client
        self._wants_text = output.text
        self._details = TokenDetailBuffer() if output.per_token else None
        self._held_texts: list[str] | None = None if output.stream else []
        self._prompt_told = 0

    def resume_from(self, received: ReceivedSequence) -> None:
        """Continues from the last token the client received from another router."""
        self._prompt_told = bool(received.token_ids)
        if self._details is not None and received.cumulative_log_prob is not None:
            self._details.resume_from(received.cumulative_log_prob)

    @property
    def cumulative_log_prob(self) -> float | None:
        """Sum of the log-probabilities of the tokens put; None if not requested."""
        return self._details.told_sum if self._details else None

    def add_details(self, details: pb.TokenDetails, known: int) -> None:
        """Keeps the data of tokens at the decoder, skipping the first `known` of them."""
        if self._details is not None:
            self._details.add(details, known)

    def put_prompt(self, details: pb.PromptDetails) -> None:
        """Puts data of prompt positions not put before."""
        fresh, self._prompt_told = unheard(details, self._prompt_told)
        if fresh is not None:
            event = router_pb.GenerateEvent(
                batch_index=self._batch_index,
                sequence_index=self._sequence_index,
                prompt_details=fresh,
            )
            self._client.put(event)

    def put_start(self, metrics: pb.PerfMetrics) -> None:
        """Puts the metrics before the first token, if streamed; the end repeats them."""
        if self._held_texts is None:
            started = router_pb.SequenceStarted(perf_metrics=metrics)
            event = router_pb.GenerateEvent(
                batch_index=self._batch_index,
                sequence_index=self._sequence_index,
                sequence_started=started,
            )
            self._client.put(event)

    def deliver(self, token_ids: list[int], start: int, end: int, text: str) -> None:
        """Puts `token_ids[start:end]` with their text, or holds the text until the end."""
        if not self._wants_text:
            # Decoded only for stop texts.
            text = ""
        if self._held_texts is None:
            if self._details is None:
                # The usual case, of every token.
                self._client.put_tokens(
                    self._batch_index, self._sequence_index, start, token_ids[start:end], text, None
                )
            else:
                self._put(token_ids, start, end, text)
        else:
            self._held_texts.append(text)

    def complete(self, token_ids: list[int], end: int) -> None:
        """The sequence ended with `token_ids[:end]`: puts everything unless streamed."""
        if self._held_texts:
            self._put(token_ids, 0, end, "".join(self._held_texts))

    def restart(self) -> None:
        """Forgets everything; the next put, from offset 0, replaces the client's tokens."""
        if self._details is not None:
            self._details = TokenDetailBuffer()
        if self._held_texts:
            self._held_texts = []

    def _put(self, token_ids: list[int], start: int, end: int, text: str) -> None:
        """Puts tokens in a single event, or in several for large logits."""
        details = self._details
        while True:
            count = end - start
            if details is not None:
                count = details.fitting(count, MOST_MESSAGE_BYTES)
            stop = start + count
            self._client.put_tokens(
                self._batch_index,
                self._sequence_index,
                start,
                token_ids[start:stop],
                text if stop == end else "",
                details.pop(count) if details is not None else None,
            )
            start = stop
            if start == end:
                return


COMPLETE = frozenset({pb.FINISH_REASON_END_ID, pb.FINISH_REASON_STOP_WORD, pb.FINISH_REASON_LENGTH})
"""A worker's reasons for the end of a sequence, if nobody stopped the sequence."""

PROMPT_END = 8
"""Tokens of the prompt needed by a tokenizer to continue the prompt's text."""


class Delivery(Enum):
    """The output that a client still gets after the end of a sequence."""

    ALL = "all"
    """All tokens and their text: a worker reports the end first, and a tokenizer answers."""
    DECODED = "decoded"
    """The tokens with text."""
    NOTHING = "nothing"
    """Nothing more, nor the end."""


@frozen
class End:
    """The end of a sequence on a worker, or on this router between two workers."""

    reason: pb.FinishReason.ValueType
    error: TrtmeshError | None = None
    """Set for FINISH_REASON_ERROR."""
    cached_prompt_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    """The matched stop sequence or end id."""
    cumulative_log_prob: float | None = None
    """None if not asked for, or if the sequence began on another worker."""
    perf_metrics: pb.PerfMetrics | None = None
    handoff: kv_pb.HandoffDescriptor | None = None
    """The KV that the worker keeps, for FINISH_REASON_HANDOFF."""


class Assignment(Protocol):
    """A worker's hold on a sequence, until the worker reports the end, `release`, or the loss of the worker."""

    @property
    def address(self) -> str:
        """Address of the worker."""

    def stop(self, reason: pb.FinishReason.ValueType) -> None:
        """Asks the worker to end the sequence and to report the end."""

    def release(self, error: TrtmeshError | None) -> None:
        """Stops the sequence on the worker and drops later output; `error` names the worker's fault, if any."""

    def leave_kv(self, lease_id: str, seconds: float) -> None:
        """Asks the worker to stop the sequence at the next token, and to keep the KV under a lease."""


class Mover(Protocol):
    """Who moves a sequence off a worker: its owner, or the race between two copies of it."""

    def migrate(self, runs: Sequence[Any], address: str, error: TrtmeshError) -> bool:
        """Moves sequences off the worker at `address` because of `error`; False if no other worker has room now."""

    def hand_over(self, runs: Sequence[Any], address: str, cause: str) -> Sequence[Any]:
        """Moves sequences with the KV off the worker at `address`. Returns the sequences that cannot move so."""


class Owner(Mover, Protocol):
    """The item of a sequence."""

    def on_settled(self, run: SequenceRun) -> None:
        """The sequence is over. Called exactly once, after the last token."""

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        """The worker at `address` lost a live sequence, now without a worker."""

    def continues(self, run: SequenceRun) -> bool:
        """Whether a sequence continues after a handoff, or ends for its client."""

    def on_handed_over(self, run: SequenceRun, end: End) -> None:
        """A worker stopped a live sequence, now without a worker, and keeps its KV."""


@dataclass(slots=True)
class SequenceTimes:
    """Times of a sequence in seconds of the event loop's clock; 0 means not yet."""

    arrival: float
    """Arrival of the request."""
    latencies: Latencies
    trace_id: str = ""
    """Of a sampled request."""
    received: int = 0
    """Tokens that the client received from another router."""
    assigned: float = 0.0
    """Dispatch to the current worker."""
    started: float = 0.0
    """First report of an empty queue on the current worker; 0 while the sequence may be queued there."""
    first_token: float = 0.0
    last_token: float = 0.0
    longest_gap: float = 0.0
    """Of two tokens."""
    patience: float = 1.0
    """Factor on the deadlines for the next wait."""
    stays_until: float = 0.0
    """Before this time nothing but need moves the sequence again."""

    @property
    def has_token(self) -> bool:
        """Whether the current worker gave a token."""
        return self.last_token > self.assigned

    @property
    def has_begun(self) -> bool:
        """Whether the sequence has left the queue of the current worker."""
        return bool(self.started) or self.has_token

    def on_assigned(self) -> None:
        """Starts the wait on a new worker."""
        self.assigned = asyncio.get_running_loop().time()
        self.started = 0.0

    def on_tokens(self, count: int, now: float, metrics: ModelMetrics) -> None:
        metrics.tokens_out += count
        if self.last_token:
            gap = now - self.last_token
            metrics.inter_token.observe(gap)
            if gap > self.longest_gap:
                self.longest_gap = gap
        else:
            seconds = now - self.arrival
            self.latencies.time_to_first_token.observe(seconds, trace_id=self.trace_id)
            self.first_token = now
        self.last_token = now

    def on_finished(self, tokens: int) -> None:
        """The sequence is complete with so many tokens."""
        later = tokens - self.received - 1
        if later > 0:
            seconds = (self.last_token - self.first_token) / later
            self.latencies.time_per_output_token.observe(seconds, trace_id=self.trace_id)

    def corrected(self, metrics: pb.PerfMetrics, scheduled_ns: int) -> pb.PerfMetrics:
        """The last worker's metrics of a moved sequence, with arrival and first token as this router saw them, with the
        start on the first worker if known, and with the last token as seen here if the worker was lost before the
        end."""
        corrected = pb.PerfMetrics()
        corrected.CopyFrom(metrics)
        to_unix = time.time() - asyncio.get_running_loop().time()
        corrected.arrival_time_ns = int((self.arrival + to_unix) * 1e9)
        if not metrics.last_token_time_ns and self.last_token:
            corrected.last_token_time_ns = int((self.last_token + to_unix) * 1e9)
        if self.first_token:
            corrected.first_token_time_ns = int((self.first_token + to_unix) * 1e9)
            corrected.first_scheduled_time_ns = min(
                scheduled_ns or corrected.first_scheduled_time_ns, corrected.first_token_time_ns
            )
        return corrected


@dataclass(slots=True)
class Charge:
    """Charges each token of a sequence once, even if a beam is rewritten."""

    _spend: Callable[[int, float], None]
    _tokens: int
    """Charged so far, by this router or an earlier one."""

    def up_to(self, tokens: int, now: float) -> None:
        """Charges the tokens since the last call; the sequence has `tokens` now."""
        fresh = tokens - self._tokens
        if fresh > 0:
            self._tokens = tokens
            self._spend(fresh, now)


class SequenceRun(DecodedSequence):
    """State of a sequence. All methods run on the event loop without waiting.

    Invariants: `token_ids[:decoded]` was put to the client, `token_ids[decoded:]` is at the decoder. At most one worker
    holds the sequence. `owner.on_settled` is called exactly once, after the last put.
    """

    __slots__ = (
        "_item",
        "_output",
        "_stop_reason",
        "address",
        "assignment",
        "charge",
        "ended_ns",
        "ending",
        "error",
        "most_tokens",
        "moved",
        "owner",
        "prefill_end",
        "reason",
        "stop_text",
        "times",
    )

    def __init__(
        self,
        item: ItemRequest,
        sequence_index: int,
        *,
        prompt: Sequence[int],
        request_id: str,
        model: str,
        times: SequenceTimes,
        client: Reader,
        owner: Owner,
    ) -> None:
        output, stopping = item.config.output, item.config.stopping
        text_options = TextOptions(
            output.skip_special_tokens,
            stopping.stop_texts,
            stopping.include_stop_text,
            stopping.min_tokens,
            tuple(prompt[-PROMPT_END:]),
            len(prompt) > PROMPT_END,
        )
        super().__init__(model, text_options, request_id, sequence_index)
        self._item = item
        self.most_tokens = stopping.max_tokens or sys.maxsize
        self._output = SequenceWriter(item, sequence_index, client)
        self.times = times
        self.owner = owner
        self.charge: Charge | None = None
        self.assignment: Assignment | None = None
        self.address = ""
        """Address of the worker, or after the end of the last worker; '' between two workers."""
        self.moved = False
        self.prefill_end: End | None = None
        """The first end with a handoff: its figures concern the prompt."""
        self.ending: End | None = None
        """The end, as reported by the last worker or made by this router."""
        self.ended_ns = 0
        """Monotonic time of the end; 0 before."""
        self.stop_text: str | None = None
        self._stop_reason: pb.FinishReason.ValueType | None = None
        """Of the first stop."""
        self.reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
        self.error: TrtmeshError | None = None

    @property
    def is_beam(self) -> bool:
        """Whether the sequence is a beam: the worker may rewrite beams until the end."""
        return self._item.config.beam_search.beam_width > 1

    @property
    def ended(self) -> bool:
        return self.ending is not None

    def resume_from(self, received: ReceivedSequence) -> None:
        """Continues a sequence of another router from the last token the client received. Call first."""
        self.token_ids = received.token_ids.tolist()
        self.decoded = self.times.received = len(self.token_ids)
        self.moved = bool(self.token_ids)
        self._output.resume_from(received)
        if received.reason is not None:
            self.reason = received.reason
            self.over = True

    @property
    def waits_for_worker(self) -> bool:
        return not self.over and self.assignment is None and self.ending is None

    @property
    def cumulative_log_prob(self) -> float | None:
        """Sum of the log-probabilities: from the worker, or from this router after a move or a stop text, beyond which
        the worker may have generated."""
        if self.moved or self.stop_text is not None:
            return self._output.cumulative_log_prob
        return self.ending.cumulative_log_prob if self.ending is not None else None

    @property
    def queued(self) -> bool:
        """Whether the sequence may still wait in its worker's queue."""
        return self.assignment is not None and not self.times.has_begun

    def on_tokens(
        self, token_offset: int, token_ids: list[int], details: pb.TokenDetails | None = None
    ) -> None:
        """Takes new tokens from the worker, the first at `token_offset`, with their data.

        Known tokens are skipped. A beam restarting from offset 0 replaces everything before. Raises ContractBroken for
        a gap, or for more tokens than were asked for.
        """
        if self.over:
            return
        if not token_offset and self.token_ids and self.is_beam:
            self._restart()
        if self.stop_text is not None:
            return
        known = len(self.token_ids) - token_offset
        if known < 0 or token_offset + len(token_ids) > self.most_tokens:
            raise ContractBroken(
                f"it sent {len(token_ids)} tokens from {token_offset} of sequence {self.sequence_index} of request"
                f" {self.request_id!r}, where {len(self.token_ids)} was next and {self.most_tokens} are the most"
            )
        fresh = token_ids[known:] if known else token_ids
        if not fresh:
            return
        if details is not None:
            self._output.add_details(details, known)
        self.token_ids += fresh
        if self.decoder is None:
            self._deliver(len(fresh), "")
        else:
            self.decoder.decode(self, fresh)

    def on_prompt(self, details: pb.PromptDetails) -> None:
        """Takes data of a run of prompt positions; repeats from a second worker are dropped."""
        if not self.over:
            self._output.put_prompt(details)

    def on_start(self, metrics: pb.PerfMetrics) -> None:
        """Takes the metrics before the first token; those of later workers are dropped."""
        if not (self.over or self.token_ids):
            self._output.put_start(metrics)

    def check_end(self, end: worker_pb.SequenceEnd) -> None:
        """Raises ContractBroken for a complete sequence of which not all tokens came."""
        if self.over or self.stop_text is not None or end.reason not in COMPLETE:
            return
        came = len(self.token_ids)
        if end.generated_tokens != came or (not came and end.reason == pb.FINISH_REASON_LENGTH):
            raise ContractBroken(
                f"it ended sequence {self.sequence_index} of request {self.request_id!r} after {end.generated_tokens}"
                f" tokens, of which {came} came"
            )

    def on_end(self, end: End) -> None:
        """Takes the end reported by the worker."""
        assignment, self.assignment = self.assignment, None
        if self.over:
            return
        if assignment is not None and end.error is not None and end.error.row.movable:
            self.on_worker_lost(end.error)
            return
        if end.reason == pb.FINISH_REASON_HANDOFF and self.owner.continues(self):
            self._on_handoff(end)
            return
        if self.moved or self.prefill_end is not None or self._stop_reason is not None:
            end = self._completed(end)
        self.ending = end
        self.ended_ns = time.monotonic_ns()
        self.error = end.error
        if self.decoder is None or self.stop_text is not None:
            self._settle()
        else:
            self.decoder.finish(self)

    def end_as(self, reason: pb.FinishReason.ValueType, stop_token_ids: Sequence[int]) -> None:
        """Ends a sequence that its last token completed, as its worker would have done had it not been lost."""
        self.moved = True
        metrics = pb.PerfMetrics() if self._item.config.output.perf_metrics else None
        self.on_end(End(reason, stop_token_ids=stop_token_ids, perf_metrics=metrics))

    def _on_handoff(self, end: End) -> None:
        """The worker keeps the KV; another one continues, unless the text is complete."""
        self.prefill_end = self.prefill_end or end
        if self._detach():
            self.owner.on_handed_over(self, end)

    def _completed(self, end: End) -> End:
        """The last end of a moved or stopped sequence, with the figures of earlier workers."""
        if end.reason == pb.FINISH_REASON_CANCELLED and self._stop_reason is not None:
            # A stopped item releases its lease, and the release may reach the sequence first.
            end = replace(end, reason=self._stop_reason)
        before = self.prefill_end
        if (self.moved or before) and end.perf_metrics is not None:
            scheduled = before.perf_metrics if before else None
            scheduled_ns = scheduled.first_scheduled_time_ns if scheduled else 0
            metrics = self.times.corrected(end.perf_metrics, scheduled_ns)
            end = replace(end, perf_metrics=metrics)
        if before is not None:
            end = replace(end, cached_prompt_tokens=before.cached_prompt_tokens)
        return end

    def on_worker_lost(self, error: TrtmeshError) -> None:
        """The worker cannot continue the sequence."""
        address = self.address
        if self._detach():
            self.owner.on_lost(self, address, error)

    def assign(self, assignment: Assignment) -> None:
        """Hands the sequence to a worker, from the next token on."""
        self.moved = self.moved or bool(self.token_ids)
        self.assignment, self.address = assignment, assignment.address
        self.times.on_assigned()

    def leave_worker(self, error: TrtmeshError | None = None) -> None:
        """Takes the sequence off the worker; `error` is the worker's fault, if any. Settles a complete sequence."""
        if self.assignment is not None:
            self.assignment.release(error)
            self._detach()

    def end(
        self,
        reason: pb.FinishReason.ValueType,
        error: TrtmeshError | None = None,
        *,
        deliver: Delivery,
    ) -> None:
        """Ends the sequence early, on the worker and for the client. With an `error` the item fails."""
        if self.over:
            return
        if deliver is Delivery.ALL:
            self._end_after_all(reason, error)
            return
        self.reason, self.error = reason, error
        if self.assignment is not None:
            self.assignment.stop(reason if error is None else pb.FINISH_REASON_CANCELLED)
        if deliver is Delivery.DECODED:
            self._settle()
            return
        self.over = True
        if self.decoder is not None:
            self.decoder.drop(self)

    def _end_after_all(self, reason: pb.FinishReason.ValueType, error: TrtmeshError | None) -> None:
        if self.assignment is not None:
            self._stop_reason = self._stop_reason or reason
            self.assignment.stop(reason)
        elif self.ending is None:
            self.on_end(End(reason, error))

    def _detach(self) -> bool:
        """Detaches the sequence from the worker; True if another worker must continue."""
        self.assignment = None
        if self.over:
            return False
        if self.stop_text is not None and not self.is_beam:
            # The text is complete without the worker; a beam could still have been rewritten.
            self._settle()
            return False
        self.address = ""
        return True

    def _restart(self) -> None:
        """Forgets all tokens; the next put, from offset 0, replaces them at the client."""
        self.stop_text = None
        self._output.restart()
        self.forget_tokens()

    def on_text(self, token_count: int, text: str) -> None:
        """Takes the text of the next `token_count` tokens; ignored after a stop text."""
        if not self.over and self.stop_text is None and (token_count or text):
            self._deliver(token_count, text)

    def on_text_complete(self) -> None:
        """The decoder answered `finish`."""
        if not self.over:
            self._settle()

    def on_failure(self, error: TrtmeshError) -> None:
        """No tokenizer decodes the tokens."""
        self.end(pb.FINISH_REASON_ERROR, error, deliver=Delivery.DECODED)

    def on_stop_text(self, token_count: int, text: str, stop_index: int) -> None:
        """A stop text was complete after `token_count` more tokens; later tokens are void."""
        if self.over or self.stop_text is not None:
            return
        del self.token_ids[self.decoded + token_count :]
        self._deliver(token_count, text)
        self.stop_text = self.text_options.stop_texts[stop_index]
        if self.is_beam and self.ending is None:
            # The search needs every beam to the end, and may still rewrite it; after the loss of its worker, another.
            return
        if self.assignment is None:
            self._settle()
        else:
            self.assignment.stop(pb.FINISH_REASON_STOP_WORD)

    def _deliver(self, token_count: int, text: str) -> None:
        start = self.decoded
        self.decoded = start + token_count
        self._output.deliver(self.token_ids, start, self.decoded, text)

    def _settle(self) -> None:
        self.over = True
        if self.decoder is not None:
            self.decoder.drop(self)
        self._output.complete(self.token_ids, self.decoded)
        if self.stop_text is not None:
            self.error = None
            self.reason = pb.FINISH_REASON_STOP_WORD
        elif self.ending is not None:
            self.reason = self.ending.reason
        self.owner.on_settled(self)
