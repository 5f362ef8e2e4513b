"""The output received by a client before resuming a request here."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.number_lists import ids_of
from trtmesh.router.values.request import (
    MAX_REQUEST_TOKENS,
    GenerationRequest,
    ItemRequest,
    parse_request,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


@dataclass(frozen=True, slots=True)
class ReceivedSequence:
    """A sequence up to the client's last token. `reason` is set if and only if the end was received."""

    token_ids: array[int]
    reason: pb.FinishReason.ValueType | None = None
    cumulative_log_prob: float | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """Received sequences by (batch_index, sequence_index), and the items with a received terminal event."""

    sequences: Mapping[tuple[int, int], ReceivedSequence] = field(default_factory=dict)
    finished_items: frozenset[int] = frozenset()

    def has(self, batch_index: int) -> bool:
        """Whether the client has part of an unfinished item."""
        return any(index == batch_index for index, _ in self.sequences)

    def longest(self, batch_index: int) -> int:
        """Most received tokens of a sequence of an item to continue, but for the last: it may be the end."""
        lengths = (
            len(sequence.token_ids)
            for (index, _), sequence in self.sequences.items()
            if index == batch_index
        )
        return max(0, max(lengths, default=0) - 1)


NOTHING = Received()
REASONS = frozenset(pb.FinishReason.values())


def parse_resumption(
    message: router_pb.ResumeRequest, *, is_large: bool = False
) -> tuple[GenerationRequest, Received]:
    """Returns the request to resume, and the output received by the client. Raises InvalidRequest."""
    request = parse_request(message.request, "", is_large=is_large)
    return request, parse_received(message, request)


def parse_received(message: router_pb.ResumeRequest, request: GenerationRequest) -> Received:
    """Raises InvalidField if the request could not continue as if uninterrupted."""
    if not message.request.request_id:
        raise InvalidField(
            "is empty but must name the request to resume", field="request.request_id"
        )
    _check_counts(message, request)
    items = {item.batch_index: item for item in request.items}
    sequences = {}
    for number, offset in enumerate(message.received):
        name = f"received[{number}]"
        item = items.get(offset.batch_index)
        if item is None:
            limit = f"below {request.size}, the number of items, and name a valid item"
            raise InvalidField.of(f"{name}.batch_index", offset.batch_index, limit)
        if offset.sequence_index >= item.config.sequences:
            limit = f"below {item.config.sequences}, the sequences of the item"
            raise InvalidField.of(f"{name}.sequence_index", offset.sequence_index, limit)
        key = (offset.batch_index, offset.sequence_index)
        if key in sequences:
            raise InvalidField("repeats a sequence; send each one once", field=name)
        sequences[key] = _parse(name, offset, item)
    for item in request.items:
        _forget_cut_beams(item, sequences)
    for index in message.finished_items:
        if index >= request.size:
            limit = f"below {request.size}, the number of items"
            raise InvalidField.of("finished_items", index, limit)
    return Received(sequences, frozenset(message.finished_items))


def _check_counts(message: router_pb.ResumeRequest, request: GenerationRequest) -> None:
    """Counts before anything is copied. Raises InvalidField."""
    sequences = sum(item.config.sequences for item in request.items)
    tokens = sum(len(offset.token_ids) for offset in message.received[: sequences + 1])
    for name, count, most in (
        ("received", len(message.received), sequences),
        ("finished_items", len(message.finished_items), request.size),
        ("received.token_ids", tokens, MAX_REQUEST_TOKENS),
    ):
        if count > most:
            raise InvalidField(
                f"has {count} entries but must have at most {most}",
                field=name,
                value=f"{count} entries",
                limit=f"at most {most}",
            )


def _forget_cut_beams(
    item: ItemRequest, sequences: dict[tuple[int, int], ReceivedSequence]
) -> None:
    """Drops received beams unless all ended, since beams restart together."""
    if item.config.beam_search.beam_width == 1:
        return
    keys = [(item.batch_index, index) for index in range(item.config.sequences)]
    if not all(key in sequences and sequences[key].reason is not None for key in keys):
        for key in keys:
            sequences.pop(key, None)


def _parse(name: str, offset: router_pb.SequenceOffset, item: ItemRequest) -> ReceivedSequence:
    if offset.finished and not offset.reason:
        raise InvalidField(
            "is not set but the sequence is finished",
            field=f"{name}.reason",
            limit_field=f"{name}.finished",
        )
    if offset.reason and not offset.finished:
        raise InvalidField(
            "is set but the sequence is not finished; leave it out",
            field=f"{name}.reason",
            limit_field=f"{name}.finished",
        )
    if offset.reason not in REASONS:
        raise InvalidField.of(f"{name}.reason", offset.reason, "a FinishReason of this release")
    most = item.config.stopping.max_tokens
    if most is not None and len(offset.token_ids) > most:
        raise InvalidField(
            f"has {len(offset.token_ids)} tokens but the item may generate at most {most}",
            field=f"{name}.token_ids",
            value=str(len(offset.token_ids)),
            limit=f"at most {most}",
            limit_field="stopping.max_tokens",
        )
    if offset.token_ids and not offset.finished:
        _check_resumable(name, offset, item)
    has_sum = offset.HasField("cumulative_log_prob")
    return ReceivedSequence(
        ids_of(offset.token_ids),
        offset.reason if offset.finished else None,
        offset.cumulative_log_prob if has_sum else None,
    )


def _check_resumable(name: str, offset: router_pb.SequenceOffset, item: ItemRequest) -> None:
    """Raises InvalidField unless an unfinished sequence can continue after the received tokens."""
    config = item.config
    if config.sampling.seed is None and not config.sampling.greedy:
        raise InvalidField(
            "has sampled tokens but the item has no seed; set the one reported at its start",
            field=f"{name}.token_ids",
            limit_field="sampling.seed",
        )
    if config.beam_search.beam_width > 1:
        raise InvalidField(
            "has tokens of a beam, which restarts; send none",
            field=f"{name}.token_ids",
            limit_field="beam_search.beam_width",
        )
    if not config.output.stream:
        raise InvalidField(
            "has tokens of an unfinished sequence that is not streamed; send them once it is finished",
            field=f"{name}.token_ids",
            limit_field="output.stream",
        )
    if config.output.log_probs and not offset.HasField("cumulative_log_prob"):
        raise InvalidField(
            "is not set but the item requests log-probabilities",
            field=f"{name}.cumulative_log_prob",
            limit_field="output.log_probs",
        )
