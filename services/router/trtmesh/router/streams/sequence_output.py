"""What the client of one sequence gets of it: tokens with their text and data, as they come or all at the end."""

from __future__ import annotations

from trtmesh.router.streams.client_stream import MOST_MESSAGE_BYTES, ClientStream
from trtmesh.router.streams.details import TokenDetailBuffer, unheard
from trtmesh.router.values.request import ItemRequest
from trtmesh.router.values.resumption import ReceivedSequence
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


class SequenceOutput:
    """Puts what was decoded of one sequence to its client, as its item asks for it."""

    __slots__ = (
        "_batch_index",
        "_client",
        "_details",
        "_held_texts",
        "_prompt_told",
        "_sequence_index",
        "_wants_text",
    )

    def __init__(self, item: ItemRequest, sequence_index: int, client: ClientStream) -> None:
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
            self._details.cumulative_log_prob = received.cumulative_log_prob

    @property
    def cumulative_log_prob(self) -> float | None:
        """Sum of the log-probabilities of all tokens so far; None where no data of tokens is asked for."""
        return self._details.cumulative_log_prob if self._details else None

    def add_details(self, details: pb.TokenDetails, known: int) -> None:
        """Keeps the data of tokens that are yet to be decoded, the first `known` of which were here before."""
        if self._details is not None:
            self._details.add(details, known)

    def put_prompt(self, details: pb.PromptDetails) -> None:
        """Puts data of prompt positions; each once, however many workers tell it."""
        fresh, self._prompt_told = unheard(details, self._prompt_told)
        if fresh is not None:
            event = router_pb.GenerateEvent(
                batch_index=self._batch_index,
                sequence_index=self._sequence_index,
                prompt_details=fresh,
            )
            self._client.put(event)

    def put_start(self, metrics: pb.PerfMetrics) -> None:
        """Puts what is known of times and KV figures before the first token; unstreamed, the end tells all."""
        if self._held_texts is None:
            started = router_pb.SequenceStarted(perf_metrics=metrics)
            event = router_pb.GenerateEvent(
                batch_index=self._batch_index,
                sequence_index=self._sequence_index,
                sequence_started=started,
            )
            self._client.put(event)

    def deliver(self, token_ids: list[int], start: int, end: int, text: str) -> None:
        """Puts `token_ids[start:end]` and their text, or holds the text for the end where nothing is streamed."""
        if not self._wants_text:
            # Decoded for its stop texts alone.
            text = ""
        if self._held_texts is None:
            self._put(token_ids, start, end, text)
        else:
            self._held_texts.append(text)

    def complete(self, token_ids: list[int], end: int) -> None:
        """The sequence is over with `token_ids[:end]`: puts all of it where nothing was streamed."""
        if self._held_texts:
            self._put(token_ids, 0, end, "".join(self._held_texts))

    def restart(self) -> None:
        """Forgets everything; the next put, from offset 0, replaces what the client has."""
        if self._details is not None:
            self._details = TokenDetailBuffer()
        if self._held_texts:
            self._held_texts = []

    def _put(self, token_ids: list[int], start: int, end: int, text: str) -> None:
        """Puts tokens in one event, or in several where their logits are large."""
        details = self._details
        while True:
            count = end - start
            if details is not None:
                count = details.fitting(count, MOST_MESSAGE_BYTES)
            behind = start + count
            self._client.put_tokens(
                self._batch_index,
                self._sequence_index,
                start,
                token_ids[start:behind],
                text if behind == end else "",
                details.take(count) if details is not None else None,
            )
            start = behind
            if start == end:
                return
