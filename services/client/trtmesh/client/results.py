"""Folds the events of a request into a result per item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trtmesh.chassis.errors import StreamIncomplete, TrtmeshError
from trtmesh.client.events import (
    Accepted,
    Event,
    FinishReason,
    ItemFailed,
    ItemFinished,
    ItemStarted,
    PromptDetails,
    SequenceFinished,
    SequenceStarted,
    Tokens,
    Usage,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2


@dataclass(slots=True)
class SequenceResult:
    """A generated sequence. `finished` is None if the item failed first."""

    chunks: list[Tokens] = field(default_factory=list)
    finished: SequenceFinished | None = None

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)

    @property
    def reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None

    @property
    def log_probs(self) -> tuple[float, ...]:
        """Log-probability of each token, if requested."""
        details = [chunk.details for chunk in self.chunks if chunk.details]
        return tuple(value for each in details for value in each.log_probs)

    @property
    def top_log_probs(self) -> tuple[pb.TopLogProbs, ...]:
        """Alternatives of each token, if requested."""
        details = [chunk.details for chunk in self.chunks if chunk.details]
        return tuple(value for each in details for value in each.top_log_probs)

    @property
    def generation_logits(self) -> pb.Tensor | None:
        """Logits of all tokens, [tokens, vocabulary], if requested."""
        details = [chunk.details for chunk in self.chunks if chunk.details]
        return joined(
            each.generation_logits for each in details if each.HasField("generation_logits")
        )

    def add(self, chunk: Tokens) -> None:
        """Appends a chunk; an earlier offset (beam search) replaces all chunks from there."""
        while self.chunks and _end(self.chunks[-1]) > chunk.token_offset:
            self.chunks.pop()
        end = _end(self.chunks[-1]) if self.chunks else 0
        if end != chunk.token_offset:
            raise StreamIncomplete(
                f"tokens of item {chunk.batch_index}, sequence {chunk.sequence_index}, came at offset"
                f" {chunk.token_offset} after {end} tokens; those between are missing"
            )
        self.chunks.append(chunk)


def joined(tensors: Iterable[pb.Tensor]) -> pb.Tensor | None:
    """Returns a tensor with the rows of all tensors, or None for no tensors."""
    parts = list(tensors)
    if not parts:
        return None
    rows = sum(part.shape[0] for part in parts)
    return pb.Tensor(
        data_type=parts[0].data_type,
        shape=[rows, *parts[0].shape[1:]],
        data=b"".join(part.data for part in parts),
    )


def _end(chunk: Tokens) -> int:
    return chunk.token_offset + len(chunk.token_ids)


@dataclass(slots=True)
class ItemResult:
    """Result of a prompt. `error` is None exactly if the item completed."""

    batch_index: int
    sequences: list[SequenceResult] = field(default_factory=list)
    started: ItemStarted | None = None
    prompt_chunks: list[pb.PromptDetails] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    perf_metrics: pb.PerfMetrics | None = None
    receipt: receipt_pb2.SignedReceipt | None = None
    """Set if requested."""
    reason: FinishReason | None = None
    error: TrtmeshError | None = None

    @property
    def prompt_details(self) -> pb.PromptDetails | None:
        """Data of the whole prompt, if requested."""
        if not self.prompt_chunks:
            return None
        whole = pb.PromptDetails()
        for chunk in self.prompt_chunks:
            whole.log_probs.extend(chunk.log_probs)
            whole.top_log_probs.extend(chunk.top_log_probs)
        logits = joined(
            each.context_logits for each in self.prompt_chunks if each.HasField("context_logits")
        )
        if logits is not None:
            whole.context_logits.CopyFrom(logits)
        return whole

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text if self.sequences else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sequence."""
        return self.sequences[0].token_ids if self.sequences else ()

    def add(self, event: Event) -> None:
        match event:
            case ItemStarted():
                self.started = event
            case PromptDetails():
                self.prompt_chunks.append(event.details)
            case SequenceStarted():
                self.perf_metrics = event.perf_metrics
            case Tokens():
                self._sequence(event.sequence_index).add(event)
            case SequenceFinished():
                self._sequence(event.sequence_index).finished = event
            case ItemFinished():
                self.reason, self.usage = event.reason, event.usage
                self.receipt = event.receipt
                if event.perf_metrics is not None:
                    self.perf_metrics = event.perf_metrics
            case ItemFailed():
                self.reason, self.usage = FinishReason.ERROR, event.usage
                self.error = event.error

    def _sequence(self, index: int) -> SequenceResult:
        while len(self.sequences) <= index:
            self.sequences.append(SequenceResult())
        return self.sequences[index]


class Results:
    def __init__(self, items: int) -> None:
        self.items: Sequence[ItemResult] = [ItemResult(index) for index in range(items)]

    def add(self, event: Event) -> None:
        if not isinstance(event, Accepted):
            self.items[event.batch_index].add(event)
