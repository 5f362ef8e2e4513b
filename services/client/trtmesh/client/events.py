"""Events of a request as flat values: a dataclass for each kind of GenerateEvent.

router.proto documents the fields. Ids are tuples, finish reasons words, and failures exceptions of
`trtmesh.chassis.errors`; rarely requested data stays a proto message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2, router_pb2


class FinishReason(StrEnum):
    """Why a sequence ended."""

    END_ID = "end_id"
    STOP_WORD = "stop_word"
    LENGTH = "length"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    HANDOFF = "handoff"
    ERROR = "error"
    UNKNOWN = "unknown"
    """A reason newer than this client."""


_REASONS: dict[int, FinishReason] = {
    pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason
    for reason in FinishReason
    if reason is not FinishReason.UNKNOWN
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an item."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _OfSequence:
    batch_index: int
    sequence_index: int


@dataclass(frozen=True, slots=True)
class Accepted(_OfSequence):
    """The request was accepted; always the first event."""

    request_id: str
    model: str
    seed: int
    """Seed of items without their own."""


@dataclass(frozen=True, slots=True)
class ItemStarted(_OfSequence):
    """An item was placed on a worker; precedes all tokens."""

    seed: int
    prompt_tokens: int
    worker: str
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptDetails(_OfSequence):
    """Requested data of a run of prompt positions."""

    details: pb.PromptDetails


@dataclass(frozen=True, slots=True)
class Tokens(_OfSequence):
    """New tokens of a sequence, never cumulative. In beam search an earlier offset replaces all tokens from there."""

    token_offset: int
    token_ids: tuple[int, ...]
    text: str
    details: pb.TokenDetails | None


@dataclass(frozen=True, slots=True)
class SequenceStarted(_OfSequence):
    """Precedes the first token of a sequence, for streamed items with metrics."""

    perf_metrics: pb.PerfMetrics


@dataclass(frozen=True, slots=True)
class SequenceFinished(_OfSequence):
    """A sequence of an item ended."""

    reason: FinishReason
    generated_tokens: int
    stop_text: str | None
    stop_token_ids: tuple[int, ...]
    cumulative_log_prob: float | None
    handoff_state: bytes | None = None
    perf_metrics: pb.PerfMetrics | None = None


@dataclass(frozen=True, slots=True)
class ItemFinished(_OfSequence):
    """Terminal: the item is complete."""

    reason: FinishReason
    usage: Usage
    perf_metrics: pb.PerfMetrics | None
    receipt: receipt_pb2.SignedReceipt | None = None
    """Set if requested."""


@dataclass(frozen=True, slots=True)
class ItemFailed(_OfSequence):
    """Terminal: the item failed. Earlier events stay valid, and siblings continue."""

    error: TrtmeshError
    usage: Usage


Event = (
    Accepted
    | ItemStarted
    | PromptDetails
    | SequenceStarted
    | Tokens
    | SequenceFinished
    | ItemFinished
    | ItemFailed
)


def reason_number(reason: FinishReason) -> pb.FinishReason.ValueType:
    """The reason's number in the protos."""
    return next(pb.FinishReason.ValueType(n) for n, word in _REASONS.items() if word is reason)


def events_of(response: router_pb2.GenerateResponse | router_pb2.ResumeResponse) -> Iterator[Event]:
    """The events of a message in order, without kinds newer than the client."""
    for event in response.events:
        kind = event.WhichOneof("event")
        if kind in _READERS:
            yield _READERS[kind](event.batch_index, event.sequence_index, getattr(event, kind))


def _tokens(batch: int, sequence: int, message: router_pb2.TokensGenerated) -> Tokens:
    details = message.details if message.HasField("details") else None
    ids = tuple(message.token_ids)
    return Tokens(batch, sequence, message.token_offset, ids, message.text, details)


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_prompt_tokens, message.generated_tokens)


def _like(kind: type[Any]) -> Callable[[int, int, Any], Event]:
    """Reads a message with the fields of an event; unset optional ones are None."""
    names = [field.name for field in fields(kind) if field.name not in _INDEXES]

    def value(message: Any, name: str) -> Any:
        given, field = getattr(message, name), message.DESCRIPTOR.fields_by_name[name]
        if read := _VALUES.get(name):
            return read(given)
        if field.is_repeated:
            return tuple(given)
        return given if not field.has_presence or message.HasField(name) else None

    return lambda batch, sequence, message: kind(
        batch, sequence, *(value(message, name) for name in names)
    )


_INDEXES = ("batch_index", "sequence_index")
_VALUES: dict[str, Callable[[Any], Any]] = {
    "reason": lambda number: _REASONS.get(number, FinishReason.UNKNOWN),
    "usage": _usage,
    "error": from_proto,
}
_READERS: dict[str, Callable[[int, int, Any], Event]] = {
    "accepted": _like(Accepted),
    "item_started": _like(ItemStarted),
    "prompt_details": PromptDetails,
    "sequence_started": _like(SequenceStarted),
    "tokens": _tokens,
    "sequence_finished": _like(SequenceFinished),
    "item_finished": _like(ItemFinished),
    "item_failed": _like(ItemFailed),
}
