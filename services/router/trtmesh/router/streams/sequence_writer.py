"""Puts a sequence's tokens, texts and data to the client, streamed or all at the end."""

from __future__ import annotations

from trtmesh.router.streams.client_stream import MOST_MESSAGE_BYTES, ClientStream
from trtmesh.router.streams.details import TokenDetailBuffer, unheard
from trtmesh.router.values.request import ItemRequest
from trtmesh.router.values.resumption import ReceivedSequence
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


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
