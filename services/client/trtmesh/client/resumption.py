"""Progress of a request: the basis for another router to continue without gap or repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from trtmesh.client.events import (
    Accepted,
    Event,
    ItemFailed,
    ItemFinished,
    ItemStarted,
    PromptDetails,
    SequenceFinished,
    SequenceStarted,
    Tokens,
    reason_number,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2

K = TypeVar("K")


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int] = field(default_factory=list)
    cumulative_log_prob: float | None = None
    finished: SequenceFinished | None = None


class Progress:
    """Follows the events of a request over several calls."""

    def __init__(self, request: router_pb2.GenerateRequest) -> None:
        self.request = request
        self.accepted = False
        self.resumed = False
        """Whether a second router was asked and may repeat events."""
        self.unfinished = set(range(len(request.items)))
        self._seed = 0
        self._started: set[int] = set()
        self._prompts: set[tuple[int, int]] = set()
        self._sequences_started: set[tuple[int, int]] = set()
        self._sequences: dict[tuple[int, int], _Sequence] = {}

    @classmethod
    def before_item(cls, request: router_pb2.GenerateRequest, batch_index: int) -> Progress:
        """The progress of a request of which only one item is missing, from its first token on."""
        progress = cls(request)
        progress.accepted = True
        progress.unfinished = {batch_index}
        return progress

    def add(self, event: Event) -> bool:
        """Notes an event. Returns whether the event is new to the caller."""
        return self._is_new(event) or not self.resumed

    def _is_new(self, event: Event) -> bool:
        key = (event.batch_index, event.sequence_index)
        match event:
            case Accepted():
                first = not self.accepted
                if first:
                    self.accepted, self._seed = True, event.seed
                return first
            case ItemStarted():
                return _added(self._started, event.batch_index)
            case PromptDetails():
                return _added(self._prompts, key)
            case SequenceStarted():
                return _added(self._sequences_started, key)
            case Tokens():
                return self._add_tokens(self._sequence(key), event)
            case SequenceFinished():
                sequence = self._sequence(key)
                first = sequence.finished is None
                sequence.finished = event
                return first
            case ItemFinished() | ItemFailed():
                first = event.batch_index in self.unfinished
                self.unfinished.discard(event.batch_index)
                return first

    def rest(self) -> router_pb2.ResumeRequest:
        """The request for the remaining events, for another router."""
        self.resumed = True
        request = router_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        for config in [request.config, *(i.config for i in request.items if i.HasField("config"))]:
            if not config.sampling.HasField("seed"):
                config.sampling.seed = self._seed
        offsets = [
            self._offset(key, sequence)
            for key, sequence in self._sequences.items()
            if key[0] in self.unfinished and self._can_go_on(key[0], sequence)
        ]
        over = set(range(len(request.items))) - self.unfinished
        return router_pb2.ResumeRequest(
            request=request, received=offsets, finished_items=sorted(over)
        )

    def _sequence(self, key: tuple[int, int]) -> _Sequence:
        return self._sequences.setdefault(key, _Sequence())

    def _add_tokens(self, sequence: _Sequence, event: Tokens) -> bool:
        known = len(sequence.token_ids)
        replaces = not self.resumed or self._is_beam(event.batch_index)
        if event.token_offset < known and not replaces:
            return False
        del sequence.token_ids[event.token_offset :]
        sequence.token_ids += event.token_ids
        if event.details is not None and event.details.HasField("cumulative_log_prob"):
            sequence.cumulative_log_prob = event.details.cumulative_log_prob
        return True

    def _config(self, batch_index: int) -> pb.GenerationConfig:
        item = self.request.items[batch_index]
        return item.config if item.HasField("config") else self.request.config

    def _is_beam(self, batch_index: int) -> bool:
        return self._config(batch_index).beam_search.beam_width > 1

    def _can_go_on(self, batch_index: int, sequence: _Sequence) -> bool:
        """Returns whether another router can continue: beams and unstreamed sequences start over."""
        if self._is_beam(batch_index):
            return False
        output = self._config(batch_index).output
        streamed = output.stream or not output.HasField("stream")
        return sequence.finished is not None or streamed

    @staticmethod
    def _offset(key: tuple[int, int], sequence: _Sequence) -> router_pb2.SequenceOffset:
        offset = router_pb2.SequenceOffset(
            batch_index=key[0],
            sequence_index=key[1],
            token_ids=sequence.token_ids,
            cumulative_log_prob=sequence.cumulative_log_prob,
        )
        if sequence.finished is not None:
            offset.finished = True
            offset.reason = reason_number(sequence.finished.reason)
        return offset


def _added(known: set[K], key: K) -> bool:
    """Adds a key. Returns whether the key is new."""
    new = key not in known
    known.add(key)
    return new
