"""Strategies for the next tokens of sequences: sampling and none here, beam search in `beams`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.engine.backend import SequenceEnd, StepOutput
from trtmesh.engine.backends.torch.sequence import Sequence
from trtmesh.engine.scheduling.sequence import Pairs
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor
    from trtmesh.engine.backends.torch.compute.device import Compute
    from trtmesh.engine.backends.torch.sampling.choice import TokenChoice


class Choice(Protocol):
    """Next tokens for the rows of a step, or the data for choosing them."""

    def read(self) -> dict[int, TrtmeshError]:
        """Waits for the device. Returns the failed rows, and why."""


C = TypeVar("C", bound=Choice)


class Decoding(ABC, Generic[C]):
    """Sequences with a common end."""

    def __init__(self, keys: SequenceOf[int], sequences: SequenceOf[Sequence]) -> None:
        self.keys = tuple(keys)
        """Names of the resulting sequences."""
        self.sequences = tuple(sequences)
        """The sequences in the scheduler."""
        self.forks: Pairs[Sequence] = ()
        """Sequences to continue from the KV of others after `advance`; cleared by the engine."""
        self.ends: SequenceOf[SequenceEnd] = ()
        """The ends of all keys; empty while the decoding runs."""

    @staticmethod
    @abstractmethod
    def choose(compute: Compute, sequences: SequenceOf[Sequence], logits: Tensor) -> C:
        """Launches the choice for the rows `logits` [sequences, vocabulary] of any decodings of this kind."""

    @abstractmethod
    def advance(
        self, sequence: Sequence, choice: C, row: int, output: StepOutput, now_ns: int
    ) -> int:
        """Takes a sequence's row of a choice, after `read`, and adds the new tokens to `output`.

        Returns the number of tokens generated.
        """

    @abstractmethod
    def settle(self) -> None:
        """Sets `ends` where the tokens say so."""

    @abstractmethod
    def deliver(self, output: StepOutput) -> None:
        """Adds tokens held back until the end."""

    def end_of(self, key: int, reason: int) -> SequenceEnd | None:
        """Ends a key where the others can continue alone; None where all end together."""
        return None

    @abstractmethod
    def broken_off(self, reason: int, error: TrtmeshError | None = None) -> list[SequenceEnd]:
        """The ends of all keys after the tokens delivered so far."""


class SampledDecoding(Decoding["TokenChoice"]):
    """A single sequence, with tokens drawn, or picked greedily."""

    @staticmethod
    def choose(compute: Compute, sequences: SequenceOf[Sequence], logits: Tensor) -> TokenChoice:
        return compute.choose(sequences, logits)

    def advance(
        self, sequence: Sequence, choice: TokenChoice, row: int, output: StepOutput, now_ns: int
    ) -> int:
        details = choice.details(row) if sequence.token_rules.wants_details else None
        sequence.tell_next(choice.token_ids[row], details, output, now_ns)
        self.settle()
        if sequence.outgoing and not self.ends:
            self.ends = [sequence.end(pb.FINISH_REASON_HANDOFF)]
        return 1

    def settle(self) -> None:
        (sequence,) = self.sequences
        end = sequence.rule.end_after(sequence.tokens)
        if end:
            self.ends = [sequence.end(*end)]

    def deliver(self, output: StepOutput) -> None:
        """Every token was delivered with the step."""

    def broken_off(self, reason: int, error: TrtmeshError | None = None) -> list[SequenceEnd]:
        return [self.sequences[0].end(reason, error=error)]


class NoChoice:
    """Implements Choice without tokens."""

    def read(self) -> dict[int, TrtmeshError]:
        return {}


class PrefillDecoding(Decoding[NoChoice]):
    """The prompt of several sequences or beams, handed over before their first tokens."""

    @staticmethod
    def choose(_compute: Compute, _sequences: SequenceOf[Sequence], _logits: Tensor) -> NoChoice:
        return NoChoice()

    def advance(
        self, sequence: Sequence, choice: NoChoice, row: int, output: StepOutput, now_ns: int
    ) -> int:
        self.ends = self.broken_off(pb.FINISH_REASON_HANDOFF)
        return 0

    def settle(self) -> None:
        (sequence,) = self.sequences
        end = sequence.rule.end_after(sequence.tokens)
        if end:
            self.ends = [self._end(key, *end) for key in self.keys]

    def deliver(self, output: StepOutput) -> None:
        """There are no tokens."""

    def end_of(self, key: int, reason: int) -> SequenceEnd | None:
        if len(self.keys) == 1:
            return None
        if key == self.keys[0]:
            # The prompt's details are for the first sequence.
            self.sequences[0].reader = None
        self.keys = tuple(each for each in self.keys if each != key)
        return self._end(key, reason)

    def broken_off(self, reason: int, error: TrtmeshError | None = None) -> list[SequenceEnd]:
        return [self._end(key, reason, error=error) for key in self.keys]

    def _end(
        self,
        key: int,
        reason: int,
        stop_token_ids: tuple[int, ...] = (),
        error: TrtmeshError | None = None,
    ) -> SequenceEnd:
        return replace(self.sequences[0].end(reason, stop_token_ids, error), key=key)
