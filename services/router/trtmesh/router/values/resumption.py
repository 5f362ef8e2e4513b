"""What a client already has of a request that it wants to go on here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtmesh.chassis.errors import InvalidField
from trtmesh.router.values.request import GenerationRequest, ItemRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


@dataclass(frozen=True, slots=True)
class ReceivedSequence:
    """One sequence as far as its client has it. `reason` is set exactly when its end was received."""

    token_ids: tuple[int, ...]
    reason: pb.FinishReason.ValueType | None = None
    cumulative_log_prob: float | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """What a client has, by (batch_index, sequence_index), and the items that are over for it."""

    sequences: Mapping[tuple[int, int], ReceivedSequence] = field(default_factory=dict)
    finished_items: frozenset[int] = frozenset()

    @property
    def anything(self) -> bool:
        """Whether the client has something of the request."""
        return bool(self.sequences or self.finished_items)

    def has(self, batch_index: int) -> bool:
        """Whether the client has something of an item that is not over."""
        return any(index == batch_index for index, _ in self.sequences)

    def rest_of(self, request: GenerationRequest) -> list[ItemRequest]:
        """The items that are not over for the client."""
        return [item for item in request.items if item.batch_index not in self.finished_items]


NOTHING = Received()


def parse_received(message: router_pb.ResumeRequest, request: GenerationRequest) -> Received:
    """Raises InvalidField where the request could not go on as if nothing had happened."""
    if not message.request.request_id:
        raise InvalidField("request.request_id is empty but must name the request to go on with")
    sequences = {}
    for number, offset in enumerate(message.received):
        name = f"received[{number}]"
        if offset.batch_index >= len(request.items):
            limit = f"below {len(request.items)}, the number of items"
            raise InvalidField.of(f"{name}.batch_index", offset.batch_index, limit)
        item = request.items[offset.batch_index]
        if offset.sequence_index >= item.config.sequences:
            limit = f"below {item.config.sequences}, the sequences of the item"
            raise InvalidField.of(f"{name}.sequence_index", offset.sequence_index, limit)
        key = (offset.batch_index, offset.sequence_index)
        if key in sequences:
            raise InvalidField(f"{name} names a sequence that came before; send each one once")
        sequences[key] = _parse(name, offset, item)
    for index, item in enumerate(request.items):
        _forget_cut_search(index, item, sequences)
    for index in message.finished_items:
        if index >= len(request.items):
            limit = f"below {len(request.items)}, the number of items"
            raise InvalidField.of("finished_items", index, limit)
    return Received(sequences, frozenset(message.finished_items))


def _forget_cut_search(
    batch_index: int, item: ItemRequest, sequences: dict[tuple[int, int], ReceivedSequence]
) -> None:
    """Beams begin again all together, so one whose end was received before the others' is told once more."""
    if item.config.beam_search.beam_width == 1:
        return
    keys = [(batch_index, index) for index in range(item.config.sequences)]
    if not all(key in sequences and sequences[key].reason is not None for key in keys):
        for key in keys:
            sequences.pop(key, None)


def _parse(name: str, offset: router_pb.SequenceOffset, item: ItemRequest) -> ReceivedSequence:
    config = item.config
    if offset.finished and not offset.reason:
        raise InvalidField(f"{name}.reason is not set but must be, as the sequence is finished")
    if offset.reason and not offset.finished:
        raise InvalidField(f"{name}.reason is set but `finished` is not; set both or none")
    if offset.reason not in pb.FinishReason.values():
        raise InvalidField.of(f"{name}.reason", offset.reason, "a FinishReason of this release")
    most = config.stopping.max_tokens
    if most is not None and len(offset.token_ids) > most:
        raise InvalidField(
            f"{name}.token_ids has {len(offset.token_ids)} tokens but must have at most {most}, the item's max_tokens"
        )
    has_sum = offset.HasField("cumulative_log_prob")
    if offset.token_ids and not offset.finished:
        if config.sampling.seed is None and not config.sampling.greedy:
            raise InvalidField(
                f"{name} has drawn tokens but the item no sampling.seed; set the seed that `accepted` reported"
            )
        if config.beam_search.beam_width > 1:
            raise InvalidField(f"{name} is a beam, which begins again; send no token_ids of it")
        if not config.output.stream:
            raise InvalidField(f"{name} is not streamed; send token_ids only once it is finished")
        if config.output.log_probs and not has_sum:
            raise InvalidField(f"{name}.cumulative_log_prob is not set but the item asks for it")
    return ReceivedSequence(
        tuple(offset.token_ids),
        offset.reason if offset.finished else None,
        offset.cumulative_log_prob if has_sum else None,
    )
