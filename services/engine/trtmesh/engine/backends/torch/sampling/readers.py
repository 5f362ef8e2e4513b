"""What is read off the logits of tokens that were given, not generated: prompt details, and the past of a sequence.

A reader wants a run of positions, each once, in order. Their KV must not come from elsewhere, because only what is
computed has logits; a sequence that is paused and computed anew goes on reading where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import torch
from torch import Tensor
from trtmesh.engine.backend import PromptDetails
from trtmesh.engine.backends.torch.sampling.choice import TokenChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.details import most_likely, tensor_of

PIECE_BYTES = 2**20
"""Most logits in one PromptDetails, unless a single row has more: what carries them must fit them into messages."""
ROWS_AT_ONCE = 64
"""Rows turned into log-probabilities at once, in float64."""

Choose = Callable[[SequenceOf[Continuation], Tensor], TokenChoice]


class Reader(Protocol):
    """Wants the logits of the positions [next, end); `next` grows with what was read."""

    next: int
    end: int

    def read(self, logits: Tensor) -> Iterator[PromptDetails]:
        """Takes the logits [positions, vocabulary] float32 from position `next` on."""


def reader_for(sequence: Continuation, choose: Choose) -> Reader | None:
    """What the sequence's item asks to be read; None in most cases."""
    output = sequence.token_rules.output
    if sequence.generated_tokens:
        # Whoever generated those tokens told about the prompt.
        return PastReader(sequence, choose) if sequence.token_rules.wants_log_probs else None
    # The first token of a prompt has no log-probability.
    asks = output.context_logits or (output.prompt_log_probs and sequence.prompt_tokens > 1)
    # All sequences of an item have the same prompt, so the first tells of it.
    return PromptReader(sequence) if asks and sequence.sequence_index == 0 else None


class PromptReader:
    """Log-probabilities of prompt tokens, their alternatives, and logits."""

    def __init__(self, sequence: Continuation) -> None:
        self.next = 0
        # What follows the last prompt token is no prompt token, so only its logits are of use.
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
                details.context_logits = tensor_of(piece, output.logits_data_type)
            self.next += len(piece)
            yield details

    def _add_log_probs(self, details: PromptDetails, logits: Tensor) -> None:
        """Row i of `logits` is of position `next` + i and foretells the token after it."""
        tokens = self._sequence.tokens[self.next + 1 : self._sequence.prompt_tokens]
        alternatives = self._sequence.token_rules.output.top_log_probs
        for first in range(0, min(len(logits), len(tokens)), ROWS_AT_ONCE):
            following = tokens[first : min(first + ROWS_AT_ONCE, len(logits))]
            rows = logits[first : first + len(following)].double().log_softmax(dim=1)
            ids = torch.tensor(following, device=rows.device)
            details.log_probs += rows.gather(1, ids[:, None])[:, 0].tolist()
            if alternatives:
                details.top_log_probs += [most_likely(row, alternatives) for row in rows]


class PastReader:
    """Sums up the log-probabilities of tokens that another worker generated."""

    def __init__(self, sequence: Continuation, choose: Choose) -> None:
        self.next = sequence.prompt_tokens - 1
        self.end = len(sequence.tokens) - 1
        self._sequence = sequence
        self._choose = choose
        self._past = Continuation(
            sequence.key,
            sequence.batch_index,
            sequence.sequence_index,
            sequence.tokens[: sequence.prompt_tokens],
            sequence.rule,
            sequence.token_rules,
        )

    def read(self, logits: Tensor) -> Iterator[PromptDetails]:
        past, tokens = self._past, self._sequence.tokens
        for place in range(len(logits)):
            token = tokens[len(past.tokens)]
            choice = self._choose([past], logits[place : place + 1])
            self._sequence.add_log_probs([choice.log_prob(0, token)])
            past.tokens.append(token)
            self.next += 1
        yield from ()
