"""Strategies for the next tokens of sequences: sampling here, beam search in `beams`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.engine.backend import SequenceEnd, StepOutput
from trtmesh.engine.backends.torch.beams.decoding import BeamDecoding
from trtmesh.engine.backends.torch.scheduling.sequence import Pairs, Sequence

if TYPE_CHECKING:
    from torch import Tensor
    from trtmesh.engine.backends.torch.compute.device import Compute
    from trtmesh.engine.backends.torch.sampling.choice import TokenChoice


class Choice(Protocol):
    """Next tokens for the rows of a step, or the data for choosing them."""

    def read(self) -> dict[int, TrtmeshError]:
        """Waits for the device. Returns the failed rows, and why."""


C = TypeVar("C", bound=Choice)


class Decoding(Protocol[C]):
    """One or more sequences with a common end."""

    @property
    def keys(self) -> tuple[int, ...]:
        """Names of the resulting sequences."""

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences in the scheduler."""

    forks: Pairs
    """Sequences to continue from the KV of others after `advance`; cleared by the engine."""
    ends: SequenceOf[SequenceEnd]
    """The ends of all keys; empty while the decoding runs."""

    @staticmethod
    def choose(compute: Compute, sequences: SequenceOf[Sequence], logits: Tensor) -> C:
        """Launches the choice for the rows `logits` [sequences, vocabulary] of any decodings of this kind."""

    def advance(
        self, sequence: Sequence, choice: C, row: int, output: StepOutput, now_ns: int
    ) -> int:
        """Takes a sequence's row of a choice, after `read`, and adds the new tokens to `output`.

        Returns the number of tokens generated.
        """

    def settle(self) -> None:
        """Sets `ends` where the tokens say so."""

    def deliver(self, output: StepOutput) -> None:
        """Adds tokens held back until the end."""

    def broken_off(self, reason: int, error: TrtmeshError | None = None) -> list[SequenceEnd]:
        """The ends of all keys after the tokens delivered so far."""


class SampledDecoding:
    """Implements Decoding for one sequence; its tokens are drawn, or picked greedily."""

    forks: Pairs = ()

    def __init__(self, sequence: Sequence) -> None:
        self.keys = (sequence.key,)
        self.sequences = (sequence,)
        self.ends: SequenceOf[SequenceEnd] = ()

    @staticmethod
    def choose(compute: Compute, sequences: SequenceOf[Sequence], logits: Tensor) -> TokenChoice:
        return compute.choose(sequences, logits)

    def advance(
        self, sequence: Sequence, choice: TokenChoice, row: int, output: StepOutput, now_ns: int
    ) -> int:
        details = choice.details(row) if sequence.token_rules.wants_details else None
        sequence.tell_next(choice.token_ids[row], details, output, now_ns)
        self.settle()
        return 1

    def settle(self) -> None:
        (sequence,) = self.sequences
        end = sequence.rule.end_after(sequence.tokens)
        if end:
            self.ends = [sequence.end(*end)]

    def deliver(self, output: StepOutput) -> None:
        """Every token was delivered with its step."""

    def broken_off(self, reason: int, error: TrtmeshError | None = None) -> list[SequenceEnd]:
        return [self.sequences[0].end(reason, error=error)]


def decodings_of(keys: SequenceOf[int], sequences: SequenceOf[Sequence]) -> list[Decoding[Any]]:
    """The strategy of an item: `keys` come back, `sequences` are computed."""
    if sequences[0].config.beam_search.beam_width > 1:
        return [BeamDecoding(keys, sequences)]
    return [SampledDecoding(sequence) for sequence in sequences]
