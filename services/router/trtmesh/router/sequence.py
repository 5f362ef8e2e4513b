"""One generated sequence on its way from a worker through a tokenizer to the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from trtmesh.chassis.errors import (
    Draining,
    QueueFull,
    StreamIncomplete,
    TrtmeshError,
    WorkerLost,
    from_proto,
    to_proto,
)
from trtmesh.router.client_stream import MOST_TENSOR_BYTES, ClientStream
from trtmesh.router.details import TokenDetailBuffer, unheard
from trtmesh.router.pulse import Deadlines
from trtmesh.router.request import ItemRequest
from trtmesh.router.resumption import ReceivedSequence
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

MOVABLE = (WorkerLost, Draining, QueueFull)
"""Errors that say something of the worker and nothing of the sequence, which another worker may go on with."""


class Assignment(Protocol):
    """That a worker has a sequence; over with the end that the worker tells, with `release`, or with the worker."""

    @property
    def address(self) -> str:
        """Address of the worker."""

    def stop(self, reason: pb.FinishReason.ValueType) -> None:
        """Asks the worker to end the sequence, and to tell so."""

    def release(self) -> None:
        """Takes the sequence away from the worker: it is told to stop, and whatever it still says is dropped."""


class Owner(Protocol):
    """Whoever lets a sequence run."""

    def on_settled(self, run: SequenceRun) -> None:
        """The sequence is over; called exactly once, after its last token."""

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        """The worker at `address` does not go on with a sequence that is not over. No worker has it now."""

    def move(self, runs: Sequence[SequenceRun], address: str, why: str) -> bool:
        """Takes sequences away from the worker at `address` if another one takes them now; tells whether it did."""


class Decoder(Protocol):
    """Where a sequence's tokens become text."""

    def decode(self, sequence: SequenceRun, token_ids: list[int]) -> None:
        """Asks for the text of new tokens; answered by `sequence.on_text` or `sequence.on_stop_text`."""

    def finish(self, sequence: SequenceRun) -> None:
        """Asks for the rest of the text; answered by `on_text` and then by `on_text_complete`."""

    def restart(self, sequence: SequenceRun) -> None:
        """Forgets what was asked of the sequence, which begins anew: with no token, and nothing is answered."""

    def drop(self, sequence: SequenceRun) -> None:
        """Forgets the sequence; it is not answered any more."""


class SequenceRun:
    """State of one sequence. All methods run on the event loop and none waits.

    Invariants: `token_ids[:decoded]` was put to the client; `token_ids[decoded:]` is with the decoder. At most one
    worker has the sequence at a time. `owner.on_settled` is called exactly once, after the last put, and nothing is
    put after it.
    """

    __slots__ = (
        "_client", "_details", "_held_texts", "_item", "_prompt_told", "_wants_text", "arrival_time", "assigned_at",
        "assignment", "decode_handle", "decoded", "decoder", "end", "error", "first_token_time", "last_token_time",
        "model", "moved", "over", "owner", "patience", "reason", "request_id", "sequence_index", "started_at",
        "stop_text", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        item: ItemRequest,
        sequence_index: int,
        *,
        request_id: str,
        model: str,
        arrival_time: float,
        client: ClientStream,
        owner: Owner,
    ) -> None:
        output = item.config.output
        self._item = item
        self.sequence_index = sequence_index
        self.request_id = request_id
        self.model = model
        self.arrival_time = arrival_time
        self._client = client
        self.owner = owner
        self._wants_text = output.text
        self._details = TokenDetailBuffer() if output.per_token else None
        self._held_texts: list[str] | None = None if output.stream else []
        self.decoder: Decoder | None = None
        self.decode_handle = 0
        self.assignment: Assignment | None = None
        self.assigned_at = 0.0
        self.started_at = 0.0
        """When the worker's queue was first empty, by the event loop's time; 0 while the sequence may wait there."""
        self.patience = 1.0
        """How many times longer than the deadlines say it may wait."""
        self.moved = False
        self._prompt_told = 0
        self.token_ids: list[int] = []
        self.decoded = 0
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.end: engine_pb.SequenceEnd | None = None
        self.stop_text: str | None = None
        self.reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
        self.error: TrtmeshError | None = None
        self.over = False

    @property
    def is_beam(self) -> bool:
        """Whether it is a sequence of a beam search, which may be rewritten until it ends."""
        return self._item.config.beam_search.beam_width > 1

    @property
    def skip_special_tokens(self) -> bool:
        return self._item.config.output.skip_special_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return self._item.config.stopping.stop_texts

    @property
    def include_stop_text(self) -> bool:
        return self._item.config.stopping.include_stop_text

    def go_on_behind(self, received: ReceivedSequence) -> None:
        """Begins where a client got to with it on another router; before anything else is done with it."""
        self.token_ids = list(received.token_ids)
        self.decoded = len(self.token_ids)
        self._prompt_told = self.moved = bool(self.token_ids)
        if self._details is not None and received.cumulative_log_prob is not None:
            self._details.cumulative_log_prob = received.cumulative_log_prob
        if received.reason is not None:
            self.reason = received.reason
            self.over = True

    @property
    def waits_for_worker(self) -> bool:
        """Whether the sequence can go on only where a worker takes it."""
        return not self.over and self.assignment is None and self.end is None

    @property
    def prompt_told(self) -> bool:
        """Whether the data of the prompt was put, so that another worker need not tell it again."""
        return bool(self.token_ids)

    @property
    def cumulative_log_prob(self) -> float | None:
        """Sum of the log-probabilities, where the worker or, after a move, the router knows it."""
        if self.end is not None and self.end.HasField("cumulative_log_prob"):
            return self.end.cumulative_log_prob
        return self._details.cumulative_log_prob if self.moved and self._details else None

    def on_tokens(
        self, token_offset: int, token_ids: list[int], details: pb.TokenDetails | None = None
    ) -> None:
        """New tokens from the worker, the first at `token_offset`, and their data. Those already known are skipped,
        except that a beam that comes again from offset 0 replaces all that was known of it."""
        if self.over:
            return
        if self.is_beam and not token_offset and self.token_ids:
            self._restart()
        if self.stop_text is not None:
            return
        known = len(self.token_ids) - token_offset
        if known < 0:
            self.fail(_gap(self, token_offset))
            return
        fresh = token_ids[known:] if known else token_ids
        if not fresh:
            return
        if details is not None and self._details is not None:
            self._details.add(details, known)
        self.token_ids += fresh
        if self.decoder is None:
            self._deliver(len(fresh), "")
        else:
            self.decoder.decode(self, fresh)

    def on_prompt(self, details: pb.PromptDetails) -> None:
        """Optional data of a run of prompt positions; each once, however many workers tell it."""
        fresh, self._prompt_told = unheard(details, self._prompt_told)
        if not self.over and fresh is not None:
            event = router_pb.GenerateEvent(
                batch_index=self._item.batch_index,
                sequence_index=self.sequence_index,
                prompt_details=fresh,
            )
            self._client.put(event)

    def on_end(self, end: engine_pb.SequenceEnd) -> None:
        """The worker's last word on this sequence."""
        assignment, self.assignment = self.assignment, None
        if self.over:
            return
        error = from_proto(end.error) if end.HasField("error") else None
        if assignment is not None and isinstance(error, MOVABLE):
            self._lose(assignment.address, error)
            return
        self.end = end
        self.error = error
        if self.moved and end.HasField("perf_metrics"):
            self._mend(end.perf_metrics)
        if self.decoder is None or self.stop_text is not None:
            self._settle()
        else:
            self.decoder.finish(self)

    def on_worker_lost(self, error: TrtmeshError) -> None:
        """The worker that has the sequence is gone."""
        assignment, self.assignment = self.assignment, None
        if assignment is not None and not self.over:
            self._lose(assignment.address, error)

    def assign(self, assignment: Assignment) -> None:
        """A worker takes the sequence, from its next token on."""
        self.moved = self.moved or bool(self.token_ids)
        self.assignment = assignment
        self.assigned_at = asyncio.get_running_loop().time()
        self.started_at = 0.0

    def is_late(self, now: float, deadlines: Deadlines) -> bool:
        """Whether the worker keeps the sequence waiting for longer than it may."""
        if self.last_token_time > self.assigned_at:
            return now - self.last_token_time > self.patience * deadlines.first_token_seconds
        if self.started_at:
            return now - self.started_at > self.patience * deadlines.first_token_seconds
        return now - self.assigned_at > self.patience * deadlines.started_seconds

    def release(self) -> None:
        """Takes the sequence away from its worker, to go on elsewhere."""
        if self.assignment is not None:
            self.assignment.release()
            self.assignment = None

    def stop(self, reason: pb.FinishReason.ValueType) -> None:
        """Ends the sequence early; what was generated is delivered."""
        if self.over:
            return
        if self.assignment is not None:
            self.assignment.stop(reason)
        elif self.end is None:
            self.on_end(engine_pb.SequenceEnd(reason=reason, generated_tokens=len(self.token_ids)))

    def give_up(self, error: TrtmeshError) -> None:
        """Ends a sequence that no worker has with an error, behind all its tokens."""
        count = len(self.token_ids)
        self.on_end(
            engine_pb.SequenceEnd(
                reason=pb.FINISH_REASON_ERROR, generated_tokens=count, error=to_proto(error)
            )
        )

    def _lose(self, address: str, error: TrtmeshError) -> None:
        if self.stop_text is not None and not self.is_beam:
            # The sequence is whole, whatever became of its worker; a beam might yet have been rewritten.
            self._settle()
        else:
            self.owner.on_lost(self, address, error)

    def _mend(self, metrics: pb.PerfMetrics) -> None:
        """The last worker knows when it took the item itself; when that began, this router knows best."""
        to_unix = time.time() - asyncio.get_running_loop().time()
        metrics.arrival_time_ns = int((self.arrival_time + to_unix) * 1e9)
        if self.first_token_time:
            metrics.first_token_time_ns = int((self.first_token_time + to_unix) * 1e9)
            metrics.first_scheduled_time_ns = min(
                metrics.first_scheduled_time_ns, metrics.first_token_time_ns
            )

    def _restart(self) -> None:
        """Forgets everything; the next put, from offset 0, replaces what the client has."""
        self.token_ids = []
        self.decoded = 0
        self.stop_text = None
        if self._details is not None:
            self._details = TokenDetailBuffer()
        if self._held_texts:
            self._held_texts = []
        if self.decoder is not None:
            self.decoder.restart(self)

    def on_text(self, token_count: int, text: str) -> None:
        """The text of the next `token_count` tokens; void after a stop text."""
        if self.over or self.stop_text is not None:
            return
        if token_count or text:
            self._deliver(token_count, text)

    def on_text_complete(self) -> None:
        """No more text comes: `finish` was answered."""
        if not self.over:
            self._settle()

    def on_stop_text(self, token_count: int, text: str, stop_index: int) -> None:
        """A stop text was complete after `token_count` more tokens; what the worker sent beyond is void."""
        if self.over or self.stop_text is not None:
            return
        del self.token_ids[self.decoded + token_count :]
        self._deliver(token_count, text)
        self.stop_text = self.stop_texts[stop_index]
        if self.assignment is None:
            self._settle()
        elif not self.is_beam:
            # A beam may still be rewritten, and the search needs it to the end.
            self.assignment.stop(pb.FINISH_REASON_STOP_WORD)

    def fail(self, error: TrtmeshError) -> None:
        """Ends the sequence with an error."""
        if not self.over:
            self.error = error
            self._dismiss_worker(pb.FINISH_REASON_CANCELLED)
            self._settle()

    def abandon(self, reason: pb.FinishReason.ValueType) -> None:
        """Ends the sequence because nobody waits for it any more: nothing is put, the worker stops."""
        if not self.over:
            self.over = True
            self._dismiss_worker(reason)
            if self.decoder is not None:
                self.decoder.drop(self)

    def _dismiss_worker(self, reason: pb.FinishReason.ValueType) -> None:
        if self.assignment is not None:
            self.assignment.stop(reason)

    def _deliver(self, token_count: int, text: str) -> None:
        start = self.decoded
        self.decoded = start + token_count
        if not self._wants_text:
            # Decoded for its stop texts alone.
            text = ""
        if self._held_texts is None:
            self._put(start, text)
        else:
            self._held_texts.append(text)

    def _put(self, start: int, text: str) -> None:
        """Puts what was decoded from `start` on, in several events where its logits are large."""
        details = self._details
        while True:
            count = self.decoded - start
            if details is not None:
                count = details.fitting(count, MOST_TENSOR_BYTES)
            end = start + count
            self._client.put_tokens(
                self._item.batch_index,
                self.sequence_index,
                start,
                self.token_ids[start:end],
                text if end == self.decoded else "",
                details.take(count) if details is not None else None,
            )
            start = end
            if start == self.decoded:
                return

    def _settle(self) -> None:
        self.over = True
        if self.decoder is not None:
            self.decoder.drop(self)
        if self._held_texts:
            self._put(0, "".join(self._held_texts))
        if self.stop_text is not None:
            self.error = None
            self.reason = pb.FINISH_REASON_STOP_WORD
        elif self.end is not None:
            self.reason = self.end.reason
        self.owner.on_settled(self)


def _gap(sequence: SequenceRun, token_offset: int) -> TrtmeshError:
    return StreamIncomplete(
        f"the worker sent token {token_offset} of sequence {sequence.sequence_index} but"
        f" {len(sequence.token_ids)} was next"
    )
