"""One generated sequence on its way from a worker through a tokenizer to the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trtmesh.chassis.errors import StreamIncomplete, TrtmeshError, from_proto
from trtmesh.router.client_stream import ClientStream
from trtmesh.router.details import TokenDetailBuffer
from trtmesh.router.request import ItemRequest
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

StopWorker = Callable[[pb.FinishReason.ValueType], None]


class Decoder(Protocol):
    """Where a sequence's tokens become text."""

    def decode(self, sequence: SequenceRun, token_ids: list[int]) -> None:
        """Asks for the text of new tokens; answered by `sequence.on_text` or `sequence.on_stop_text`."""

    def finish(self, sequence: SequenceRun) -> None:
        """Asks for the rest of the text; answered by `on_text` and then by `on_text_complete`."""

    def drop(self, sequence: SequenceRun) -> None:
        """Forgets the sequence; it is not answered any more."""


class SequenceRun:
    """State of one sequence. All methods run on the event loop and none waits.

    Invariants: `token_ids[:decoded]` was put to the client; `token_ids[decoded:]` is with the decoder. `settled` is
    called exactly once, after the last put, and nothing is put after it.
    """

    __slots__ = (
        "_client", "_details", "_held_texts", "_item", "_settled", "_wants_text", "arrival_time", "decode_handle",
        "decoded", "decoder", "end", "error", "last_token_time", "model", "over", "reason", "request_id",
        "sequence_index", "stop_text", "stop_worker", "token_ids",
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
        settled: Callable[[SequenceRun], None],
    ) -> None:
        output = item.config.output
        self._item = item
        self.sequence_index = sequence_index
        self.request_id = request_id
        self.model = model
        self.arrival_time = arrival_time
        self._client = client
        self._settled = settled
        self._wants_text = output.text
        self._details = TokenDetailBuffer() if output.per_token else None
        self._held_texts: list[str] | None = None if output.stream else []
        self.decoder: Decoder | None = None
        self.decode_handle = 0
        self.stop_worker: StopWorker = _not_started
        self.token_ids: list[int] = []
        self.decoded = 0
        self.last_token_time = 0.0
        self.end: engine_pb.SequenceEnd | None = None
        self.stop_text: str | None = None
        self.reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
        self.error: TrtmeshError | None = None
        self.over = False

    @property
    def skip_special_tokens(self) -> bool:
        return self._item.config.output.skip_special_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return self._item.config.stopping.stop_texts

    @property
    def include_stop_text(self) -> bool:
        return self._item.config.stopping.include_stop_text

    def on_tokens(self, token_offset: int, token_ids: list[int]) -> None:
        """New tokens from the worker, the first at `token_offset`. Tokens already known are skipped."""
        if self.over or self.stop_text is not None:
            return
        known = len(self.token_ids) - token_offset
        if known < 0:
            self.fail(_gap(self, token_offset))
            return
        fresh = token_ids[known:] if known else token_ids
        if not fresh:
            return
        self.token_ids += fresh
        if self.decoder is None:
            self._deliver(len(fresh), "")
        else:
            self.decoder.decode(self, fresh)

    def on_details(self, details: pb.TokenDetails) -> None:
        """Optional data of tokens that `on_tokens` brings next."""
        if self._details is not None:
            self._details.add(details)

    def on_prompt(self, details: pb.PromptDetails) -> None:
        """Optional data of the prompt."""
        if not self.over:
            event = router_pb.GenerateEvent(
                batch_index=self._item.batch_index,
                sequence_index=self.sequence_index,
                prompt_details=details,
            )
            self._client.put(event)

    def on_end(self, end: engine_pb.SequenceEnd) -> None:
        """The worker's last word on this sequence."""
        if self.over:
            return
        self.end = end
        if end.HasField("error"):
            self.error = from_proto(end.error)
        if self.decoder is None or self.stop_text is not None:
            self._settle()
        else:
            self.decoder.finish(self)

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
        if self.over:
            return
        del self.token_ids[self.decoded + token_count :]
        self._deliver(token_count, text)
        self.stop_text = self.stop_texts[stop_index]
        if self.end is None:
            self.stop_worker(pb.FINISH_REASON_STOP_WORD)
        else:
            self._settle()

    def fail(self, error: TrtmeshError) -> None:
        """Ends the sequence with an error."""
        if not self.over:
            self.error = error
            self.stop_worker(pb.FINISH_REASON_CANCELLED)
            self._settle()

    def abandon(self, reason: pb.FinishReason.ValueType) -> None:
        """Ends the sequence because nobody waits for it any more: nothing is put, the worker stops."""
        if not self.over:
            self.over = True
            self.stop_worker(reason)
            if self.decoder is not None:
                self.decoder.drop(self)

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
        self._client.put_tokens(
            self._item.batch_index,
            self.sequence_index,
            start,
            self.token_ids[start : self.decoded],
            text,
            self._details.take(self.decoded - start) if self._details is not None else None,
        )

    def _settle(self) -> None:
        self.over = True
        if self.decoder is not None:
            self.decoder.drop(self)
        if self._held_texts:
            self._put(0, "".join(self._held_texts))
        if self.stop_text is not None:
            # The sequence is whole, whatever became of its worker.
            self.error = None
            self.reason = pb.FINISH_REASON_STOP_WORD
        elif self.end is not None:
            self.reason = self.end.reason
        self._settled(self)


def _not_started(reason: pb.FinishReason.ValueType) -> None:
    """Stops nothing: no worker has the sequence yet."""
    del reason


def _gap(sequence: SequenceRun, token_offset: int) -> TrtmeshError:
    return StreamIncomplete(
        f"the worker sent token {token_offset} of sequence {sequence.sequence_index} but"
        f" {len(sequence.token_ids)} was next"
    )
