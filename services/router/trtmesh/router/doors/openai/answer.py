"""Makes an answer of the events of a request, with a choice for each sequence."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import orjson
from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import Cancelled, DeadlineExceeded, InvalidField, TrtmeshError
from trtmesh.router.doors.openai.answer_parser import AnswerParser, Reading
from trtmesh.router.doors.openai.answer_parts import AnswerPart, Content, Reasoning
from trtmesh.router.doors.openai.log_probs import Scored, TokenTexts, scored
from trtmesh.router.doors.openai.tools import ToolUse, about_schema
from trtmesh.router.streams.client_stream import Waiting, WaitingTokens
from trtmesh.router.values.request import GenerationRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

DONE = b"data: [DONE]\n\n"
GUIDE = "guided_decoding.guide"
BLANK = "\0"
"""Stands in a template of events where the text goes."""
FINISH_REASONS = {
    pb.FINISH_REASON_END_ID: "stop",
    pb.FINISH_REASON_STOP_WORD: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class ByTemplate:
    """An answer that a tokenizer reads by the response template of the model."""

    tools: str
    """As the chat template gets them."""
    prompt_end: str = ""
    """The end of the prompt's text."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, and the answer that it asks for."""

    request: GenerationRequest
    model: str
    """Its name for the client."""
    sequences: int
    """Of each item."""
    streamed: bool
    with_usage: bool = False
    """Whether a stream ends with the usage."""
    with_usage_so_far: bool = False
    """Whether each of its chunks has the usage up to there, as vLLM's."""
    with_token_ids: bool = False
    """Whether choices have the ids of their tokens."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their numbers."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the request that an answer of `/v1/responses` repeats."""
    reading: Reading | None = None
    """How to read the answers; None where they are text alone, or a tokenizer reads them."""
    by_template: ByTemplate | None = None
    tools: ToolUse | None = None
    with_reasoning: bool = True
    """Whether the answer shows the reasoning."""
    reasoning_ids: Sequence[int] = ()
    """The token that begins reasoning and the one that ends it; none where a mark is several tokens."""

    @property
    def choices(self) -> int:
        return self.request.size * self.sequences

    @property
    def has_log_probs(self) -> bool:
        return self.request.items[0].config.output.log_probs

    @property
    def is_read_apart(self) -> bool:
        """Whether the answers wait for a tokenizer, to read them or to describe their tokens."""
        return self.has_log_probs or self.by_template is not None

    @property
    def is_plain(self) -> bool:
        """Whether more tokens are more text, and nothing else."""
        has_more = self.with_token_ids or self.with_usage_so_far or self.is_read_apart
        return self.reading is None and not has_more

    def worded(self, error: TrtmeshError) -> TrtmeshError:
        """The error of an item, as one about what the request has in place of the guide."""
        if self.reading is None or error.field != GUIDE or not isinstance(error, InvalidField):
            return error
        return about_schema(error, self.tools)

    def extras(self, piece: Piece) -> dict[str, Any]:
        """Returns the fields of a choice that OpenAI's API does not have."""
        return {"token_ids": piece.token_ids} if self.with_token_ids else {}


class Piece(NamedTuple):
    """News of a choice."""

    choice: int
    text: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    scored: Sequence[Scored] | None = None
    """The tokens with their log-probabilities, where asked for."""
    said: Sequence[AnswerPart] = ()
    """The parts of the text, in place of it, where it is more than content."""
    so_far: Consumption | None = None
    """The usage of the request up to here, where each chunk has it."""


class Writer(Protocol):
    def text(self, choice: int, text: str) -> bytes:
        """The events of more text of a choice, and nothing else."""

    def of(self, piece: Piece, bytes_of: Mapping[int, bytes]) -> bytes:
        """Returns the events of a piece, as bytes; none if it shows nothing new."""

    def end(self, usage: Consumption) -> bytes:
        """The events behind the last choice."""

    def failed(self, errors: Sequence[Mapping[str, Any]]) -> bytes:
        """The last events of a stream with errors, after the choices of other prompts."""


class Gathered(NamedTuple):
    """All of an answer."""

    pieces: Sequence[Piece]
    usage: Consumption
    bytes_of: Mapping[int, bytes]


def scored_of(pieces: Iterable[Piece]) -> list[Scored]:
    """All tokens with log-probabilities."""
    return [token for piece in pieces for token in piece.scored or ()]


class Choices(ABC):
    """An endpoint whose answers are lists of choices."""

    id_prefix: str
    whole: str
    """The `object` of an answer."""
    chunk: str
    """The `object` of a part of a stream."""

    def writer(self, wanted: Wanted, frame: Frame) -> Writer:
        return StreamedAnswer(wanted, self, frame)

    def answer(self, wanted: Wanted, frame: Frame, gathered: Gathered) -> bytes:
        own: list[list[Piece]] = [[] for _ in range(wanted.choices)]
        for piece in gathered.pieces:
            own[piece.choice].append(piece)
        choices = []
        for index, parts in enumerate(own):
            whole = Piece(
                index,
                "".join(each.text for each in parts),
                [token for each in parts for token in each.token_ids],
                parts[-1].finish_reason if parts else None,
                scored_of(parts) if wanted.has_log_probs else None,
                [said for each in parts for said in each.said],
            )
            texts = TokenTexts(wanted.tokens_as_ids, gathered.bytes_of)
            choices.append(self.choice(whole, texts) | wanted.extras(whole))
        return orjson.dumps(
            frame.of(self.whole) | {"choices": choices, "usage": gathered.usage.told()}
        )

    @abstractmethod
    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first part of a choice in a stream, if it has one before its text."""

    @abstractmethod
    def part(self, piece: Piece, texts: TokenTexts) -> dict[str, Any]:
        """A part of a choice in a stream."""

    @abstractmethod
    def choice(self, piece: Piece, texts: TokenTexts) -> dict[str, Any]:
        """A whole choice."""


class Events:
    """Reads the events of a request: what is new of its choices, the usage, and the errors of its items."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted, self._sequences = wanted, wanted.sequences
        self._readers = None if wanted.reading is None else Readers(wanted)
        self.usage = Consumption()
        self._so_far = Consumption() if wanted.with_usage_so_far else None
        self.errors: list[TrtmeshError] = []

    def read(self, waiting: Sequence[Waiting]) -> Iterator[Piece]:
        """The news of the choices."""
        for entry in waiting:
            if isinstance(entry, WaitingTokens):
                choice = entry.batch_index * self._sequences + entry.sequence_index
                texts = entry.texts
                text = texts[0] if len(texts) == 1 else "".join(texts)
                details = entry.details
                found = None if details is None else scored(entry.token_ids, details)
                piece = Piece(choice, text, entry.token_ids, scored=found, so_far=self._so_far)
                if self._so_far is not None:
                    self._so_far.generated += len(entry.token_ids)
                yield piece if self._readers is None else self._readers.read(piece)
            elif (other := self._read_other(entry.event)) is not None:
                yield other if self._readers is None else self._readers.read(other)

    def _read_other(self, event: router_pb.GenerateEvent) -> Piece | None:
        match event.WhichOneof("event"):
            case "item_started" if self._so_far is not None:
                self._so_far.prompt += event.item_started.prompt_tokens
            case "sequence_finished":
                reason = FINISH_REASONS.get(event.sequence_finished.reason)
                choice = event.batch_index * self._sequences + event.sequence_index
                if reason is not None:
                    return Piece(choice, finish_reason=reason, so_far=self._so_far)
            case "item_finished":
                self.usage.add(event.item_finished)
                if self._readers is not None:
                    self.usage.reasoning = self._readers.reasoning_tokens
                if (error := _cut_off(event.item_finished.reason)) is not None:
                    self.errors.append(error.of_item(event.batch_index))
            case "item_failed":
                error = self._wanted.worded(from_proto(event.item_failed.error))
                self.errors.append(error.of_item(event.batch_index))
        return None


class Readers:
    """Reads the text of each choice."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._parsers: dict[int, AnswerParser] = {}
        self._is_thinking: dict[int, bool] = {}
        self.reasoning_tokens = 0

    def read(self, piece: Piece) -> Piece:
        """Returns the piece with the parts of its text in place of the text."""
        if (parser := self._parsers.get(piece.choice)) is None:
            assert self._wanted.reading is not None
            new_id = partial(call_id, self._wanted, piece.choice)
            parser = self._parsers[piece.choice] = AnswerParser(self._wanted.reading, new_id)
            self._is_thinking[piece.choice] = self._wanted.reading.is_thinking
        self._count(piece)
        said = parser.feed(piece.text) if piece.text else ()
        if piece.finish_reason is not None:
            said = [*said, *parser.end()]
        return read_piece(piece, said, self._wanted, has_calls=bool(parser.calls))

    def _count(self, piece: Piece) -> None:
        """Counts the tokens of the reasoning, including the marks around it."""
        if not self._wanted.reasoning_ids:
            return
        begin, end = self._wanted.reasoning_ids
        is_thinking = self._is_thinking[piece.choice]
        for token in piece.token_ids:
            is_thinking = is_thinking or token == begin
            self.reasoning_tokens += is_thinking
            is_thinking = is_thinking and token != end
        self._is_thinking[piece.choice] = is_thinking


def read_piece(
    piece: Piece, said: Sequence[AnswerPart], wanted: Wanted, *, has_calls: bool
) -> Piece:
    """Returns the piece with the parts of its text in place of the text. `has_calls` counts for the whole answer."""
    reason = piece.finish_reason
    reason = "tool_calls" if reason == "stop" and has_calls else reason
    if not wanted.with_reasoning:
        said = [each for each in said if not isinstance(each, Reasoning)]
    if len(said) == 1 and isinstance(said[0], Content):
        return piece._replace(text=said[0].text, finish_reason=reason)
    return piece._replace(text="", said=said, finish_reason=reason)


def call_id(wanted: Wanted, choice: int, index: int) -> str:
    """Names a call: the same name in the same place of a request. The templates of some models want nine letters and
    digits."""
    tools, request = wanted.tools, wanted.request
    place = f"{request.request_id} {choice} {index}".encode()
    digest = blake2b(place, digest_size=12).hexdigest()
    is_short = tools is not None and any(each.has_short_ids for each in tools.formats)
    return digest[:9] if is_short else f"call_{digest}"


def _cut_off(reason: int) -> TrtmeshError | None:
    """Returns the error of an item that was stopped or ran out of time, else None: no finish reason of this API says
    that."""
    if reason == pb.FINISH_REASON_STOPPED:
        return Cancelled("the request was stopped before its end")
    if reason == pb.FINISH_REASON_CANCELLED:
        return DeadlineExceeded("the deadline of the request passed before its end")
    return None


@dataclass(slots=True)
class Frame:
    """What all parts of an answer have in common."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class StreamedAnswer:
    def __init__(self, wanted: Wanted, form: Choices, frame: Frame) -> None:
        self._form, self._wanted = form, wanted
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """What stands before and behind the text in its event, by choice."""
        self._texts: dict[int, TokenTexts] = {}
        self._frame = frame.of(form.chunk)
        self._head = b"data: " + orjson.dumps(self._frame)[:-1] + b',"choices":['

    def text(self, choice: int, text: str) -> bytes:
        # Every token passes here.
        if text and (around := self._around.get(choice)) is not None:
            return around[0] + orjson.dumps(text) + around[1]
        return self.of(Piece(choice, text), {})

    def of(self, piece: Piece, bytes_of: Mapping[int, bytes]) -> bytes:
        events = b""
        texts = self._texts.get(piece.choice)
        if texts is None:
            texts = self._texts[piece.choice] = TokenTexts(self._wanted.tokens_as_ids)
            before, _, behind = self._event(
                self._form.part(Piece(piece.choice, BLANK), texts)
            ).rpartition(orjson.dumps(BLANK))
            self._around[piece.choice] = before, behind
            if (opening := self._form.opening(piece.choice)) is not None:
                events = self._event(opening)
        texts.bytes_of = bytes_of
        is_news = piece.text or piece.said or piece.finish_reason or piece.scored
        if is_news or self._wanted.with_token_ids:
            part = self._form.part(piece, texts) | self._wanted.extras(piece)
            events += self._event(part, piece.so_far)
        return events

    def _event(self, choice: dict[str, Any], so_far: Consumption | None = None) -> bytes:
        usage = b"" if so_far is None else b',"usage":' + orjson.dumps(so_far.told())
        return self._head + orjson.dumps(choice) + b"]" + usage + b"}\n\n"

    def end(self, usage: Consumption) -> bytes:
        if not self._wanted.with_usage:
            return DONE
        last = self._frame | {"choices": [], "usage": usage.told()}
        return b"data: " + orjson.dumps(last) + b"\n\n" + DONE

    def failed(self, errors: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join(b"data: %b\n\n" % orjson.dumps({"error": each}) for each in errors) + DONE


@dataclass(slots=True)
class Consumption:
    """What the items of a request consumed together. A prompt counts once, whatever the number of its sequences."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    predicted: int = 0
    """Tokens of the client's prediction that were tried."""
    accepted: int = 0
    """Tokens of the prediction that the model generated."""
    reasoning: int = 0
    """Generated tokens of reasoning."""

    def add(self, finished: router_pb.ItemFinished) -> None:
        usage, metrics = finished.usage, finished.perf_metrics
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_prompt_tokens
        self.generated += usage.generated_tokens
        self.predicted += metrics.total_draft_tokens
        self.accepted += metrics.total_accepted_draft_tokens

    def told(self) -> dict[str, Any]:
        """The usage as the API has it."""
        told: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        details: dict[str, int] = {}
        if self.predicted:
            details["accepted_prediction_tokens"] = self.accepted
            details["rejected_prediction_tokens"] = self.predicted - self.accepted
        if self.reasoning:
            details["reasoning_tokens"] = self.reasoning
        return told | {"completion_tokens_details": details} if details else told
