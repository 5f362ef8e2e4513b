"""One generated sequence on its way from a worker through a tokenizer to the client."""

from __future__ import annotations

from trtmesh.chassis.error_wire import from_proto, to_proto
from trtmesh.chassis.errors import StreamIncomplete, TrtmeshError
from trtmesh.router.admission import Charge
from trtmesh.router.streams.client_stream import ClientStream
from trtmesh.router.streams.partners import Assignment, Decoder, Owner
from trtmesh.router.streams.sequence_output import SequenceOutput
from trtmesh.router.streams.sequence_times import SequenceTimes
from trtmesh.router.values.request import ItemRequest
from trtmesh.router.values.resumption import ReceivedSequence
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb


class SequenceRun:
    """State of one sequence. All methods run on the event loop and none waits.

    Invariants: `token_ids[:decoded]` was put to the client; `token_ids[decoded:]` is with the decoder. At most one
    worker has the sequence at a time. `owner.on_settled` is called exactly once, after the last put, and nothing is
    put after it.
    """

    __slots__ = (
        "_decoded_at_loss", "_item", "_output", "address", "assignment", "charge", "decode_handle", "decoded",
        "decoder", "decoder_losses", "end", "error", "model", "moved", "over", "owner", "reason", "request_id",
        "sequence_index", "stop_text", "times", "token_ids",
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
        self._item = item
        self._output = SequenceOutput(item, sequence_index, client)
        self.sequence_index = sequence_index
        self.request_id = request_id
        self.model = model
        self.times = SequenceTimes(arrival_time)
        self.owner = owner
        self.charge: Charge | None = None
        self.decoder: Decoder | None = None
        self.decode_handle = 0
        self.decoder_losses = 0
        """Tokenizers in a row that were lost with it and decoded nothing of it."""
        self._decoded_at_loss = 0
        self.assignment: Assignment | None = None
        self.address = ""
        """Address of the worker that has it, or where it ended; '' when it left the one and no other took it."""
        self.moved = False
        self.token_ids: list[int] = []
        self.decoded = 0
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
        self.moved = bool(self.token_ids)
        self._output.go_on_behind(received)
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
        return self._output.cumulative_log_prob if self.moved else None

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
            self.fail(
                StreamIncomplete(
                    f"the worker sent token {token_offset} of sequence {self.sequence_index} but"
                    f" {len(self.token_ids)} was next"
                )
            )
            return
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
        """Optional data of a run of prompt positions; each once, however many workers tell it."""
        if not self.over:
            self._output.put_prompt(details)

    def on_start(self, metrics: pb.PerfMetrics) -> None:
        """The worker's first token of this sequence comes next; it is the first of all unless another had it before."""
        if not (self.over or self.token_ids):
            self._output.put_start(metrics)

    def on_end(self, end: engine_pb.SequenceEnd) -> None:
        """The worker's last word on this sequence."""
        assignment, self.assignment = self.assignment, None
        if self.over:
            return
        error = from_proto(end.error) if end.HasField("error") else None
        if assignment is not None and error is not None and error.row.movable:
            self.on_worker_lost(error)
            return
        self.end = end
        self.error = error
        if self.moved and end.HasField("perf_metrics"):
            self.times.mend(end.perf_metrics)
        if self.decoder is None or self.stop_text is not None:
            self._settle()
        else:
            self.decoder.finish(self)

    def on_worker_lost(self, error: TrtmeshError) -> None:
        """The worker that has the sequence does not go on with it."""
        address = self.address
        if self._leave():
            self.owner.on_lost(self, address, error)

    def assign(self, assignment: Assignment) -> None:
        """A worker takes the sequence, from its next token on."""
        self.moved = self.moved or bool(self.token_ids)
        self.assignment, self.address = assignment, assignment.address
        self.times.on_assigned()

    def release(self, error: TrtmeshError | None = None) -> None:
        """Takes the sequence away from its worker, because of `error` where that gave cause for it, to go on elsewhere
        unless it is whole already."""
        if self.assignment is not None:
            self.assignment.release(error)
            self._leave()

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
        end = engine_pb.SequenceEnd(reason=pb.FINISH_REASON_ERROR, error=to_proto(error))
        end.generated_tokens = len(self.token_ids)
        self.on_end(end)

    def _leave(self) -> bool:
        """No worker has the sequence any more; whether it is to go on elsewhere."""
        self.assignment = None
        if self.over:
            return False
        if self.stop_text is not None and not self.is_beam:
            # The sequence is whole, whatever became of its worker; a beam might yet have been rewritten.
            self._settle()
            return False
        self.address = ""
        return True

    def _restart(self) -> None:
        """Forgets everything; the next put, from offset 0, replaces what the client has."""
        self.token_ids = []
        self.decoded = self._decoded_at_loss = 0
        self.stop_text = None
        self._output.restart()
        if self.decoder is not None:
            self.decoder.restart(self)

    def on_text(self, token_count: int, text: str) -> None:
        """The text of the next `token_count` tokens; void after a stop text."""
        if not self.over and self.stop_text is None and (token_count or text):
            self._deliver(token_count, text)

    def on_text_complete(self) -> None:
        """No more text comes: `finish` was answered."""
        if not self.over:
            self._settle()

    def note_decoder_lost(self) -> int:
        """Counts a tokenizer that was lost while it owed text; how many in a row decoded nothing, this one included."""
        if self.decoded > self._decoded_at_loss:
            self.decoder_losses, self._decoded_at_loss = 0, self.decoded
        if self.decoded < len(self.token_ids) or self.end is not None:
            self.decoder_losses += 1
        return self.decoder_losses

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
            if self.assignment is not None:
                self.assignment.stop(pb.FINISH_REASON_CANCELLED)
            self._settle()

    def abandon(self, reason: pb.FinishReason.ValueType) -> None:
        """Ends the sequence because nobody waits for it any more: nothing is put, the worker stops."""
        if not self.over:
            self.over = True
            if self.assignment is not None:
                self.assignment.stop(reason)
            if self.decoder is not None:
                self.decoder.drop(self)

    def cut_off(self, reason: pb.FinishReason.ValueType) -> bool:
        """Ends a sequence that does not go on here behind what its client has of it; False when it was over."""
        if self.over:
            return False
        self.abandon(reason)
        self.reason = reason
        return True

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
        elif self.end is not None:
            self.reason = self.end.reason
        self.owner.on_settled(self)
