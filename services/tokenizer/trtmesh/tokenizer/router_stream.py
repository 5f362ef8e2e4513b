"""What one router gets: a stream, commands in and events out, and calls beside it for a router in the same process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    Draining,
    InternalError,
    InvalidRequest,
    TrtmeshError,
    UnsupportedCall,
)
from trtmesh.chassis.forwarding import Outbox, Rest
from trtmesh.chassis.revisions import SCHEMA_REVISION, refuse_unknown, unknown_numbers
from trtmesh.chassis.rpc import ServedContext
from trtmesh.chassis.tracing.spans import Span, Tracer, continued, end
from trtmesh.tokenizer.chat.answers import TemplateReader
from trtmesh.tokenizer.chat.renderer import ChatRenderer
from trtmesh.tokenizer.decoding.states import DecodeStates, TextOptions, Workload
from trtmesh.tokenizer.encoding import EncodedTexts, Encoder, EncodeRequest, Outcome, UnreadRequest
from trtmesh.tokenizer.metrics import TokenizerMetrics
from trtmesh.tokenizer.vocabulary import Vocabulary
from trtmesh.v1 import tokenizer_pb2 as pb

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
"""About the size of a token's id or text in an event."""
TEXT_END_CHARACTERS = 1024
"""Told of a rendered conversation."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of each router's stream."""

    max_decode_states: int = 65_536
    """Most decode states; one more fails with QUEUE_FULL."""
    max_unsent_events: int = 1024
    """Most events not yet read by the router; beyond them its commands are not read."""


STREAM_LIMITS = StreamLimits()


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared by the streams of one process."""

    limits: StreamLimits
    vocabulary: Vocabulary
    encoder: Encoder
    renderer: ChatRenderer
    reader: TemplateReader
    workload: Workload
    metrics: TokenizerMetrics
    tracer: Tracer | None = None

    def begin_span(self, command: pb.EncodeCommand) -> Span | None:
        """The span of an encode that is traced."""
        if self.tracer is None or not command.traceparent:
            return None
        return continued(command.traceparent, f"tokenize {self.vocabulary.model}")

    def end_span(self, span: Span, outcome: Outcome | None) -> None:
        """Completes a span by the answer; None for a cancelled encode."""
        if isinstance(outcome, EncodedTexts):
            error = ""
            span.attributes["trtmesh.tokens"] = outcome.token_count
        else:
            error = "CANCELLED" if outcome is None else outcome.reason
        if self.tracer is not None:
            end(self.tracer, span, error)


class RouterStream:
    """The decode states and encodes of a router, for the lifetime of the stream.

    Tokens are decoded and lone short texts encoded where commands are read: a thread switch would take longer. Other
    texts are encoded in threads.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._outbox = Outbox[pb.TokenizerServiceConnectResponse, pb.TokenizerEvent](
            pb.TokenizerServiceConnectResponse,
            attrgetter("events"),
            shared.limits.max_unsent_events,
        )
        self._states = DecodeStates(
            shared.vocabulary, shared.workload, shared.metrics, shared.limits.max_decode_states
        )
        self._encodes: dict[int, asyncio.Future[Outcome]] = {}
        self._spans: dict[int, Span] = {}
        """Those of traced encodes, by handle."""
        self._final_error: TrtmeshError | None = None

    async def serve(self, context: ServedContext) -> None:
        """Answers commands until the router half-closes the stream and every command is answered.

        Raises UnsupportedCall for an unknown command, and the error of `finish`.
        """
        reader = asyncio.create_task(self._read(context))
        try:
            await self._outbox.forward(context)
            if self._final_error is not None:
                raise self._final_error
            await reader
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await reader
            self._end()

    def finish(self, error: TrtmeshError) -> None:
        """Ends the stream with an error after the waiting events are written."""
        self._final_error = error
        self._outbox.close()

    async def _read(self, context: ServedContext) -> None:
        try:
            await context.each(self._take)
            if self._encodes:
                await asyncio.wait(self._encodes.values())
        finally:
            self._outbox.close()

    def _take(self, request: pb.TokenizerServiceConnectRequest) -> Rest | None:
        """Executes commands. Returns what must wait: long openings, and room for answers."""
        commands = iter(request.commands)
        opening = self._execute(commands)
        if opening is None and self._outbox.has_room:
            return None
        return partial(self._go_on, opening, commands)

    async def _go_on(
        self, opening: Iterator[None] | None, commands: Iterator[pb.TokenizerCommand]
    ) -> None:
        while opening is not None:
            for _ in opening:
                await asyncio.sleep(0)
            opening = self._execute(commands)
        await self._outbox.wait_for_room()

    def _execute(self, commands: Iterator[pb.TokenizerCommand]) -> Iterator[None] | None:
        """Executes commands up to an opening that takes longer. Returns its other steps."""
        for command in commands:
            if command.WhichOneof("command") == "open_decode":
                asked = command.open_decode
                opening = self._states.open(
                    asked.handle, asked.request_id, asked, asked.delivered_token_ids
                )
                for _ in opening:
                    return opening
            else:
                self._handle(command)
        return None

    def _handle(self, command: pb.TokenizerCommand) -> None:
        match command.WhichOneof("command"):
            case "decode":
                event = self._outbox.add(len(command.decode.token_ids) * TOKEN_BYTES)
                self._states.decode(command.decode, event.decoded)
            case "close_decode":
                self._states.close(command.close_decode.handles)
            case "encode":
                self._encode(command.encode)
            case "cancel_encode":
                self._cancel_encodes(command.cancel_encode.handles)
            case _:
                # The stream ends: the router would wait forever for an answer.
                raise UnsupportedCall(
                    f"the tokenizer does not know command {unknown_numbers(command)}; is the router newer?"
                )

    def _encode(self, command: pb.EncodeCommand) -> None:
        handle, encoder = command.handle, self._shared.encoder
        try:
            if handle in self._encodes:
                raise InvalidRequest(
                    f"is {handle}, an encode not answered yet", field="handle", value=str(handle)
                )
            if command.schema_revision > SCHEMA_REVISION:
                refuse_unknown(command, "encode", "this tokenizer")
            if (span := self._shared.begin_span(command)) is not None:
                self._spans[handle] = span
            self._shared.workload.begin()
        except TrtmeshError as error:
            self._answer_encode(handle, error)
            return
        outcome: Outcome | asyncio.Future[Outcome]
        try:
            if command.HasField("chat"):
                outcome = asyncio.ensure_future(self._encode_chat(command))
            elif command.HasField("answer"):
                outcome = asyncio.ensure_future(self._read_answer(command))
            elif (size := command.ByteSize()) >= encoder.long_text_bytes:
                outcome = encoder.submit(UnreadRequest(size, partial(_request_of, command)))
            else:
                request = _request_of(command)
                outcome = encoder.at_once(request) or encoder.submit(request)
        except TrtmeshError as error:
            outcome = error
        if isinstance(outcome, asyncio.Future):
            self._encodes[handle] = outcome
            outcome.add_done_callback(lambda done: self._finish_encode(handle, done))
        else:
            self._shared.workload.end()
            self._answer_encode(handle, outcome)

    async def _encode_chat(self, command: pb.EncodeCommand) -> Outcome:
        """Renders a conversation, and encodes it as a text with the special tokens of the template alone."""
        try:
            text = await self._shared.renderer.render(command.chat)
            request = replace(_request_of(command), text=text)
            encoded = await self._shared.encoder.submit(request)
        except TrtmeshError as error:
            return error.with_traceback(None)
        if isinstance(encoded, EncodedTexts):
            return replace(encoded, text_end=text[-TEXT_END_CHARACTERS:])
        return encoded

    async def _read_answer(self, command: pb.EncodeCommand) -> Outcome:
        try:
            read = await self._shared.reader.read(command.answer)
        except TrtmeshError as error:
            return error.with_traceback(None)
        return EncodedTexts([], [], read_answer=read)

    def _cancel_encodes(self, handles: Iterable[int]) -> None:
        """Removes encodes from the queue; ignores handles answered already."""
        for handle in handles:
            if (encode := self._encodes.get(handle)) is not None:
                encode.cancel()

    def _finish_encode(self, handle: int, done: asyncio.Future[Outcome]) -> None:
        del self._encodes[handle]
        self._shared.workload.end()
        if not done.cancelled():
            self._answer_encode(handle, _outcome_of(done))
        elif (span := self._spans.pop(handle, None)) is not None:
            self._shared.end_span(span, None)

    def _answer_encode(self, handle: int, outcome: Outcome) -> None:
        metrics = self._shared.metrics
        if self._spans and (span := self._spans.pop(handle, None)) is not None:
            self._shared.end_span(span, outcome)
        if isinstance(outcome, EncodedTexts):
            encoded = self._outbox.add(outcome.token_count * TOKEN_BYTES).encoded
            _fill_encoded(encoded, outcome, metrics)
        else:
            metrics.failures[outcome.reason] += 1
            encoded = self._outbox.add().encoded
            encoded.error.CopyFrom(to_proto(outcome))
        encoded.handle = handle

    def _end(self) -> None:
        for encode in self._encodes.values():
            encode.cancel()
        self._states.close_all()


class DirectTexts:
    """The decode states of a router, and the texts encoded on the spot. The router's stream takes all other texts."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._states = DecodeStates(
            shared.vocabulary, shared.workload, shared.metrics, shared.limits.max_decode_states
        )
        self.decode, self.close = self._states.decode_one, self._states.close

    def encode(self, command: pb.EncodeCommand) -> pb.Encoded | None:
        """Encodes a lone short text; None for anything else, which the stream takes. Raises the error of the text."""
        shared = self._shared
        is_other = command.HasField("chat") or command.HasField("answer")
        if is_other or command.ByteSize() >= shared.encoder.long_text_bytes:
            return None
        try:
            shared.workload.begin()
        except Draining:
            # The stream says so.
            return None
        span = None if shared.tracer is None else shared.begin_span(command)
        try:
            outcome = shared.encoder.at_once(_request_of(command))
        finally:
            shared.workload.end()
        if outcome is None:
            return None
        if span is not None:
            shared.end_span(span, outcome)
        if isinstance(outcome, TrtmeshError):
            shared.metrics.failures[outcome.reason] += 1
            raise outcome
        encoded = pb.Encoded()
        _fill_encoded(encoded, outcome, shared.metrics)
        return encoded

    def open(
        self, handle: int, request_id: str, options: TextOptions, delivered: Sequence[int]
    ) -> None:
        """Opens a sequence with few delivered tokens. The first `decode` raises the failure, if any."""
        for _ in self._states.open(handle, request_id, options, delivered):
            pass

    def end(self) -> None:
        """Drops all sequences."""
        self._states.close_all()


def _outcome_of(done: asyncio.Future[Outcome]) -> Outcome:
    """The outcome of an encode. A defect becomes an error: without an answer, the router would wait for a minute."""
    if (defect := done.exception()) is None:
        return done.result()
    log.error("unexpected error in an encode", exc_info=defect)
    return InternalError(f"{type(defect).__name__}: {defect}")


def _request_of(command: pb.EncodeCommand) -> EncodeRequest:
    # Slices: protobuf ends an iteration with an error, which costs as much as a call.
    return EncodeRequest(
        command.text if command.HasField("text") else None,
        command.add_special_tokens,
        tuple(command.words[:]),
        tuple(command.spelled_words[:]),
        tuple(command.stop_texts[:]),
        command.skip_special_tokens,
        command.max_token_ids,
        tuple(command.described_token_ids[:]),
    )


def _fill_encoded(encoded: pb.Encoded, texts: EncodedTexts, metrics: TokenizerMetrics) -> None:
    """Writes and counts the ids of texts."""
    metrics.encoded_tokens += texts.token_count
    encoded.token_ids.extend(texts.token_ids)
    encoded.omitted_token_ids = texts.omitted
    encoded.text_end = texts.text_end
    if texts.read_answer is not None:
        encoded.read_answer.CopyFrom(texts.read_answer)
    for ids in texts.words:
        encoded.words.add(ids=ids)
    for spellings in texts.spelled_words:
        spelled = encoded.spelled_words.add().spellings
        for ids in spellings:
            spelled.add(ids=ids)
    if texts.token_bytes:
        encoded.token_bytes.extend(texts.token_bytes)
    if texts.stop_vocabulary is not None:
        encoded.stop_vocabulary.CopyFrom(texts.stop_vocabulary)
