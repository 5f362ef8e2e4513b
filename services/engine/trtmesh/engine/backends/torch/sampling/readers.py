"""Readers of the logits of submitted tokens: prompt details, and log-probabilities from before a migration.

A reader takes a run of positions, each once, in order. Their KV is never reused, because only computed tokens have
logits. After a preemption a reader continues at the same position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from trtmesh.engine.backend import PromptDetails
from trtmesh.engine.backends.torch.memory.tensors import to_message
from trtmesh.engine.backends.torch.sampling.choice import log_softmax, most_likely
from trtmesh.engine.backends.torch.sampling.continuation import Continuation

PIECE_BYTES = 2**20
"""Most logits in one PromptDetails, but at least a row: messages have a size limit."""
ROWS_AT_ONCE = 64
"""Rows turned into log-probabilities at once, in float64."""


class Reader(Protocol):
    """Needs the logits of positions [next, end); reading advances `next`."""

    next: int
    end: int

    def read(self, logits: Tensor) -> Iterator[PromptDetails]:
        """Takes the logits [positions, vocabulary] float32 from position `next` on."""


def reader_for(sequence: Continuation) -> Reader | None:
    """Returns the reader for the fields of the item, or None in most cases."""
    output = sequence.token_rules.output
    if sequence.generated_tokens:
        # The worker that generated those tokens delivered the prompt's details.
        return PastReader(sequence) if sequence.token_rules.wants_log_probs else None
    # The first token of a prompt has no log-probability.
    asks = output.context_logits or (output.prompt_log_probs and sequence.prompt_tokens > 1)
    # All sequences of an item have the same prompt; the first delivers its details.
    return PromptReader(sequence) if asks and sequence.sequence_index == 0 else None


class PromptReader:
    """Log-probabilities of prompt tokens, their alternatives, and logits."""

    def __init__(self, sequence: Continuation) -> None:
        self.next = 0
        # The logits of the last prompt token predict no prompt token: only context_logits needs them.
        self.end = sequence.prompt_tokens - (not sequence.token_rules.output.context_logits)
        self._sequence = sequence

    def read(self, logits: Tensor) -> Iterator[PromptDetails]:
        output = self._sequence.token_rules.output
        rows = len(logits)
        if output.context_logits:
            row_bytes = logits.shape[1] * 4
            rows = max(1, PIECE_BYTES // row_bytes)
        for first in range(0, len(logits), rows):
            piece = logits[first : first + rows]
            details = PromptDetails(self._sequence.key, token_offset=self.next)
            if output.prompt_log_probs:
                self._add_log_probs(details, piece)
            if output.context_logits:
                details.context_logits = to_message(piece, output.logits_data_type)
            self.next += len(piece)
            yield details

    def _add_log_probs(self, details: PromptDetails, logits: Tensor) -> None:
        """Row i of `logits` belongs to position `next` + i and predicts the following token."""
        tokens = self._sequence.tokens[self.next + 1 : self._sequence.prompt_tokens]
        alternatives = self._sequence.token_rules.output.top_log_probs
        for first in range(0, min(len(logits), len(tokens)), ROWS_AT_ONCE):
            following = tokens[first : min(first + ROWS_AT_ONCE, len(logits))]
            rows = log_softmax(logits[first : first + len(following)])
            ids = torch.tensor(following, device=rows.device)
            details.log_probs += rows.gather(1, ids[:, None])[:, 0].tolist()
            if alternatives:
                details.top_log_probs += [most_likely(row, alternatives) for row in rows]


class PastReader:
    """Sums up the log-probabilities of another worker's tokens."""

    def __init__(self, sequence: Continuation) -> None:
        self.next = sequence.prompt_tokens - 1
        self.end = len(sequence.tokens) - 1
        self._sequence = sequence

    def read(self, logits: Tensor) -> Iterator[PromptDetails]:
        for place in range(len(logits)):
            row = log_softmax(logits[place : place + 1])[0]
            token = self._sequence.tokens[self.next + 1]
            self._sequence.add_log_probs([float(row[token])])
            self.next += 1
        yield from ()
