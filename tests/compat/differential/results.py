"""What a client gets, whatever the way: rows of sequences with their details."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from compat.differential.cases import Case
from compat.triton import Response

PERF_NAMES = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
COUNTS = ("num_input_tokens", "num_output_tokens")
PAD = -1


@dataclass
class Generated:
    """One generated sequence."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float | None = None
    logits: Any = None
    tokens: int = 0
    """The output num_output_tokens, in a response of its own."""


@dataclass
class Row:
    """The sequences of one prompt."""

    sequences: list[Generated]
    context_logits: Any = None
    numbers: dict[str, Any] = field(default_factory=dict)
    """Outputs of one value."""


class Disagreement(AssertionError):
    """A broken promise."""


def require(holds: object, *what: object) -> None:
    if not holds:
        raise Disagreement(" ".join(map(str, what)))


def expected_names(case: Case, *, apart: bool) -> set[str]:
    """The outputs of every response; `apart`: rows and sequences come in responses of their own."""
    names = {"text_output"} if case.is_text else {"output_ids", "sequence_length"}
    if "return_log_probs" in case.flags:
        names |= {"cum_log_probs", "output_log_probs"}
    for name in ("context_logits", "generation_logits", *COUNTS):
        if f"return_{name}" in case.flags:
            names.add(name)
    if "return_perf_metrics" in case.flags:
        names.update(PERF_NAMES)
    if apart and len(case.prompts) > 1:
        names.add("batch_index")
    if apart and not case.has_beams and case.returned > 1:
        names.add("sequence_index")
    return names


def read(case: Case, responses: Sequence[Response], *, apart: bool) -> list[Row]:
    """The rows of a request. Raises Disagreement where a detail is missing or has another shape."""
    rows = [Row([Generated() for _ in range(case.returned)]) for _ in case.prompts]
    names = expected_names(case, apart=apart)
    for response in responses:
        require(not response.error, response.error)
        differ = sorted(set(response.outputs) ^ names)
        require(not differ, "outputs differ from those asked for:", differ)
        _Reading(response.outputs, rows, together=not apart, has_beams=case.has_beams).read()
    return rows


class _Reading:
    """Adds the outputs of one response to rows."""

    def __init__(
        self, outputs: Mapping[str, Any], rows: list[Row], *, together: bool, has_beams: bool
    ) -> None:
        self._outputs = outputs
        self._rows = [rows[outputs["batch_index"].item()]] if "batch_index" in outputs else rows
        if has_beams:
            # Each response has all beams whole: any may be rewritten.
            for row in self._rows:
                row.sequences = [Generated() for _ in row.sequences]
        self._sequences = [sequence for row in self._rows for sequence in row.sequences]
        if not together and not has_beams:
            index = outputs["sequence_index"].item() if "sequence_index" in outputs else 0
            self._sequences = [self._rows[0].sequences[index]]
        self._shape = (len(self._rows), len(self._sequences) // len(self._rows))

    def read(self) -> None:
        if "text_output" in self._outputs:
            self._read_texts()
        else:
            self._read_ids()
        if "cum_log_probs" in self._outputs:
            self._read_log_probs()
        if "generation_logits" in self._outputs:
            self._read_logits()
        self._read_rows()

    def _read_texts(self) -> None:
        texts = self._outputs["text_output"]
        require(texts.shape == (len(self._sequences),), "text_output has the shape", texts.shape)
        for sequence, text in zip(self._sequences, texts.tolist(), strict=True):
            sequence.text += text.decode()

    def _read_ids(self) -> None:
        lengths = self._outputs["sequence_length"]
        require(lengths.shape == self._shape, "sequence_length has the shape", lengths.shape)
        ids = self._of_sequences("output_ids")
        require(ids.shape[1] == lengths.max(), "output_ids are longer than any sequence")
        for sequence, row, length in zip(
            self._sequences, ids.tolist(), lengths.ravel().tolist(), strict=True
        ):
            require(set(row[length:]) <= {PAD}, "output_ids are not padded with -1")
            sequence.ids += row[:length]

    def _read_log_probs(self) -> None:
        sums, each = self._outputs["cum_log_probs"], self._of_sequences("output_log_probs")
        require(sums.shape == self._shape, "cum_log_probs has the shape", sums.shape)
        for sequence, row, total in zip(
            self._sequences, each.tolist(), sums.ravel().tolist(), strict=True
        ):
            while row and row[-1] == PAD:
                row.pop()
            sequence.log_probs += row
            sequence.cum_log_prob = total

    def _read_logits(self) -> None:
        for sequence, logits in zip(
            self._sequences, self._of_sequences("generation_logits"), strict=True
        ):
            before = [] if sequence.logits is None else [sequence.logits]
            sequence.logits = np.concatenate([*before, without_padding(logits)])

    def _read_rows(self) -> None:
        for at, row in enumerate(self._rows):
            if "context_logits" in self._outputs:
                row.context_logits = without_padding(self._outputs["context_logits"][at])
            for name in {*PERF_NAMES, *COUNTS} & self._outputs.keys():
                numbers = self._outputs[name]
                require(numbers.shape == (len(self._rows), 1), name, "has the shape", numbers.shape)
                row.numbers[name] = numbers[at].item()
        if "num_output_tokens" in self._outputs and len(self._sequences) == 1:
            self._sequences[0].tokens = self._outputs["num_output_tokens"].item()

    def _of_sequences(self, name: str) -> Any:
        """An output [rows, sequences, ...] as [rows * sequences, ...]."""
        output = self._outputs[name]
        require(output.shape[:2] == self._shape, name, "has the shape", output.shape)
        return output.reshape(len(self._sequences), *output.shape[2:])


def without_padding(logits: Any) -> Any:
    """The logits of a row or sequence, which were filled up with zeros to the longest."""
    return logits[np.any(logits != 0, axis=-1)]
