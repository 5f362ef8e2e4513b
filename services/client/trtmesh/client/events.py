"""Events of a request as flat values: a dataclass for each kind of GenerateEvent.

router.proto documents the fields. Ids are tuples, finish reasons words, and failures exceptions of
`trtmesh.chassis.errors`; rarely requested data stays a proto message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def _accepted(batch: int, sequence: int, message: router_pb2.RequestAccepted) -> Accepted:
    return Accepted(batch, sequence, message.request_id, message.model, message.seed)


def _item_started(batch: int, sequence: int, message: router_pb2.ItemStarted) -> ItemStarted:
    return ItemStarted(
        batch,
        sequence,
        message.seed,
        message.prompt_tokens,
        message.worker,
        tuple(message.prompt_token_ids),
    )


def _tokens(batch: int, sequence: int, message: router_pb2.TokensGenerated) -> Tokens:
    details = message.details if message.HasField("details") else None
    ids = tuple(message.token_ids)
    return Tokens(batch, sequence, message.token_offset, ids, message.text, details)


def _sequence_started(
    batch: int, sequence: int, message: router_pb2.SequenceStarted
) -> SequenceStarted:
    return SequenceStarted(batch, sequence, message.perf_metrics)


def _sequence_finished(
    batch: int, sequence: int, message: router_pb2.SequenceFinished
) -> SequenceFinished:
    has = message.HasField
    return SequenceFinished(
        batch,
        sequence,
        _REASONS.get(message.reason, FinishReason.UNKNOWN),
        message.generated_tokens,
        message.stop_text if has("stop_text") else None,
        tuple(message.stop_token_ids),
        message.cumulative_log_prob if has("cumulative_log_prob") else None,
        message.handoff_state if has("handoff_state") else None,
        message.perf_metrics if has("perf_metrics") else None,
    )


def _item_finished(batch: int, sequence: int, message: router_pb2.ItemFinished) -> ItemFinished:
    reason = _REASONS.get(message.reason, FinishReason.UNKNOWN)
    perf_metrics = message.perf_metrics if message.HasField("perf_metrics") else None
    receipt = message.receipt if message.HasField("receipt") else None
    return ItemFinished(batch, sequence, reason, _usage(message.usage), perf_metrics, receipt)


def _item_failed(batch: int, sequence: int, message: router_pb2.ItemFailed) -> ItemFailed:
    return ItemFailed(batch, sequence, from_proto(message.error), _usage(message.usage))


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_prompt_tokens, message.generated_tokens)


_READERS: dict[str, Callable[[int, int, Any], Event]] = {
    "accepted": _accepted,
    "item_started": _item_started,
    "prompt_details": PromptDetails,
    "sequence_started": _sequence_started,
    "tokens": _tokens,
    "sequence_finished": _sequence_finished,
    "item_finished": _item_finished,
    "item_failed": _item_failed,
}
