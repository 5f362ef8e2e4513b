"""The results of a request by row and sequence, and their output tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol

from trtmesh.chassis.frozen import frozen
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.doors.triton.templates.tensor_table import PERF_OUTPUTS, unasked_outputs
from trtmesh.router.doors.triton.tensors import MESH_DATA_TYPES, Output, pad_rows
from trtmesh.router.streams.client_stream import WaitingTokens
from trtmesh.router.values.request import GenerationRequest
from trtmesh.v1 import generation_pb2 as pb

TEXT_OUTPUT = "text_output"
PAD_ID = -1
PAD_LOG_PROB = -1.0
"""Pad short rows of a tensor, as in Triton's C++ backend."""

KSERVE_DATA_TYPES = {number: name for name, number in MESH_DATA_TYPES.items()}


@dataclass(slots=True)
class SequenceOutput:
    """The content of a sequence for the next response: everything, or the news."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    logits: list[pb.Tensor] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    generated: int = 0
    handoff_state: bytes = b""
    fresh: bool = False
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    stop_text: str | None = None
    """The stop text that ended the text, maybe before the end of the ids."""
    perf_metrics: pb.PerfMetrics = field(default_factory=pb.PerfMetrics)
    """So far; complete at the end."""

    def add(self, tokens: WaitingTokens) -> None:
        """Adds new tokens, or a rewritten beam as a whole."""
        if tokens.token_offset < self.generated:
            self.clear()
        self.generated = tokens.end
        self.token_ids += tokens.token_ids
        self.texts += tokens.texts
        if tokens.details is not None:
            self._add_details(tokens.details)
        self.fresh = True

    def clear(self) -> None:
        """Drops everything told so far."""
        self.token_ids.clear()
        self.texts.clear()
        self.log_probs.clear()
        self.logits.clear()
        self.fresh = False

    def _add_details(self, details: pb.TokenDetails) -> None:
        self.log_probs += details.log_probs
        if details.HasField("cumulative_log_prob"):
            self.cumulative_log_prob = details.cumulative_log_prob
        if details.HasField("generation_logits"):
            self.logits.append(details.generation_logits)


@dataclass(slots=True)
class RowOutput:
    """The content of a row for the next response."""

    index: int
    sequences: list[SequenceOutput]
    prompt_ids: Sequence[int] = ()
    prompt_tokens: int = 0
    context_logits: list[pb.Tensor] = field(default_factory=list)
    perf_metrics: pb.PerfMetrics = field(default_factory=pb.PerfMetrics)
    """Of all sequences together, at the end."""


Block = Sequence[tuple[RowOutput, Sequence[SequenceOutput]]]
"""Rows of a response, each with equally many sequences."""


class OutputBuilder(Protocol):
    """Makes the output tensors of one request."""

    @property
    def only_new_text(self) -> bool:
        """Whether streamed responses hold new text alone, provided that nothing rewrites texts."""
        ...

    def build(self, block: Block) -> list[Output]:
        """The outputs of one response."""
        ...


class DetailedOutputs:
    """Texts or token ids, and requested details."""

    def __init__(self, call: Call, request: GenerationRequest, *, text: bool) -> None:
        config = request.items[0].config
        output, by_beam = config.output, config.beam_search.beam_width > 1
        asked = {
            "cum_log_probs": output.log_probs,
            "output_log_probs": output.log_probs,
            "context_logits": output.context_logits,
            "generation_logits": output.generation_logits,
            "batch_index": call.decoupled and call.batch_size > 1,
            "sequence_index": (
                call.decoupled and config.sampling.num_return_sequences > 1 and not by_beam
            ),
            "perf_metrics": output.perf_metrics,
            "num_input_tokens": call.flag("return_num_input_tokens"),
            "num_output_tokens": call.flag("return_num_output_tokens"),
        }
        unasked = unasked_outputs(call.model.release)
        self._text = text
        self._details = {name for name, wanted in asked.items() if wanted}
        self._zeros = [name for name, wanted in asked.items() if name in unasked and not wanted]
        self._more = bool(self._details or self._zeros) or not text
        self._requested = call.requested
        self._empty = _Matrix(call.model.logits_data_type, 0, 0, b"")
        """Stands for the logits of a response without new tokens."""

    @property
    def only_new_text(self) -> bool:
        return not self._more and self._requested <= {TEXT_OUTPUT}

    def build(self, block: Block) -> list[Output]:
        outputs = [_text(block)] if self._text else _tokens(block)
        if self._more:
            outputs += self._optional(block)
        if self._requested:
            return [output for output in outputs if output.name in self._requested]
        return outputs

    def _optional(self, block: Block) -> Iterable[Output]:
        rows = [row for row, _ in block]
        if "output_log_probs" in self._details:
            sums = [s.cumulative_log_prob for _, row in block for s in row]
            beams = len(sums) // len(block)
            yield Output.of_numbers("cum_log_probs", "FP32", (len(block), beams), sums)
            yield _log_probs(block)
        if "context_logits" in self._details:
            yield self._stack("context_logits", [_joined(row.context_logits) for row in rows])
        if "generation_logits" in self._details:
            sequences = [sequence for _, row in block for sequence in row]
            logits = self._stack("generation_logits", [_joined(s.logits) for s in sequences])
            shape = (len(rows), len(sequences) // len(rows), *logits.shape[1:])
            yield Output(logits.name, logits.data_type, shape, logits.data)
        if "batch_index" in self._details:
            yield Output.of_rows("batch_index", "INT32", [row.index for row in rows])
        if "sequence_index" in self._details:
            yield Output.of_rows("sequence_index", "INT32", [row[0].index for _, row in block])
        if "perf_metrics" in self._details:
            metrics = [metrics_of(row, sequences) for row, sequences in block]
            for spec in PERF_OUTPUTS:
                values = [getattr(each, spec.name) for each in metrics]
                yield Output.of_rows(spec.name, spec.data_type, values)
        if "num_input_tokens" in self._details:
            yield Output.of_rows("num_input_tokens", "INT32", [row.prompt_tokens for row in rows])
        if "num_output_tokens" in self._details:
            counts = [sum(s.generated for s in row) for _, row in block]
            yield Output.of_rows("num_output_tokens", "INT32", counts)
        yield from (_zeros(name, block) for name in self._zeros)
        states = [sequences[0].handoff_state for _, sequences in block]
        if longest := max(map(len, states)):
            data = b"".join(state.ljust(longest, b"\0") for state in states)
            yield Output("context_phase_params", "UINT8", (len(states), longest), data)

    def _stack(self, name: str, matrices: Sequence[_Matrix]) -> Output:
        """[matrices, rows, columns], filled up with zeros; without rows, type and columns of earlier responses."""
        longest = max(matrix.rows for matrix in matrices)
        known = next((matrix for matrix in matrices if matrix.rows), self._empty)
        self._empty = _Matrix(known.data_type, 0, known.columns, b"")
        size = len(known.data) // known.rows if known.rows else 0
        data = b"".join(matrix.data.ljust(longest * size, b"\0") for matrix in matrices)
        return Output(name, known.data_type, (len(matrices), longest, known.columns), data)


def metrics_of(row: RowOutput, sequences: Sequence[SequenceOutput]) -> pb.PerfMetrics:
    """Returns the metrics of a response for `sequences`: of a single sequence, or of the row after the end."""
    if len(sequences) > 1 and row.perf_metrics.arrival_time_ns:
        return row.perf_metrics
    return sequences[0].perf_metrics


def _text(block: Block) -> Output:
    return Output.of_texts(TEXT_OUTPUT, ["".join(s.texts) for _, row in block for s in row])


def _tokens(block: Block) -> list[Output]:
    """Token ids, after the prompt's where the output includes the prompt, and their number."""
    rows = [[*row.prompt_ids, *s.token_ids] for row, sequences in block for s in sequences]
    longest, ids = pad_rows(rows, repeat(PAD_ID))
    shape = (len(block), len(rows) // len(block))
    return [
        Output.of_numbers("output_ids", "INT32", (*shape, longest), ids),
        Output.of_numbers("sequence_length", "INT32", shape, [len(row) for row in rows]),
    ]


def _log_probs(block: Block) -> Output:
    rows = [s.log_probs for _, sequences in block for s in sequences]
    longest, log_probs = pad_rows(rows, repeat(PAD_LOG_PROB))
    shape = (len(block), len(rows) // len(block), longest)
    return Output.of_numbers("output_log_probs", "FP32", shape, log_probs)


def _zeros(name: str, block: Block) -> Output:
    """Stands for a detail not asked for: no log-probabilities of the tokens, and logits of one element."""
    rows, beams = len(block), len(block[0][1])
    longest = max(len(s.token_ids) for _, row in block for s in row)
    shape = {
        "cum_log_probs": (rows, beams),
        "output_log_probs": (rows, beams, longest),
        "context_logits": (rows, 1, 1),
        "generation_logits": (rows, beams, 1, 1),
    }[name]
    return Output.of_numbers(name, "FP32", shape, [0.0] * math.prod(shape))


@frozen
class _Matrix:
    """[rows, columns] of one data type."""

    data_type: str
    rows: int
    columns: int
    data: bytes


def _joined(parts: Sequence[pb.Tensor]) -> _Matrix:
    """Stacks arrays with equal columns."""
    if not parts:
        return _Matrix("", 0, 0, b"")
    return _Matrix(
        KSERVE_DATA_TYPES[parts[0].data_type],
        sum(part.shape[0] for part in parts),
        parts[0].shape[1],
        b"".join(part.data for part in parts),
    )
