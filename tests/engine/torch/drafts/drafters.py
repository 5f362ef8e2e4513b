"""Drafters of which a test knows how often they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from engine.torch.harness import Harness
from trtmesh.engine.backends.torch.drafts.drafter import Wish
from trtmesh.engine.backends.torch.drafts.drafting import Drafting
from trtmesh.engine.backends.torch.drafts.lengths import MOST_DRAFTS, Lengths, StepTime

Known = dict[tuple[int, int], list[int]]
"""The tokens to come, by batch_index and sequence_index."""


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Implements Lengths: always as many drafts as possible, up to a number."""

    drafts: int

    def waits(self, rows: int, rates: Sequence[float], most: Sequence[int]) -> bool:
        return True

    def choose(self, rows: int, rates: Sequence[float], most: Sequence[int]) -> list[int]:
        return [min(self.drafts, each) for each in most]

    def measured(self, step: StepTime) -> None:
        """Nothing is learned."""


@dataclass(frozen=True, slots=True)
class Measuring(FixedLengths):
    """Keeps what a rule would learn from."""

    steps: list[StepTime] = field(default_factory=list)

    def measured(self, step: StepTime) -> None:
        self.steps.append(step)


class Knowing:
    """Knows the tokens to come, and tells each with probability `right`, else any number."""

    is_free = False
    seconds_apart = 0.0

    def __init__(self, known: Known, right: float = 1.0, seed: int = 0) -> None:
        self.known = known
        self.right = right
        self.dice = Random(seed)
        self.asked = 0

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        self.asked += 1
        return [
            [self._told(token) for token in self._next(sequence)[:most]]
            for sequence, most in wishes
        ]

    def _next(self, sequence: Any) -> list[int]:
        tokens = self.known.get((sequence.batch_index, sequence.sequence_index), [])
        to_come = tokens[sequence.generated_tokens :]
        return to_come + [self.dice.randrange(400) for _ in range(MOST_DRAFTS)]

    def _told(self, token: int) -> int:
        return token if self.dice.random() < self.right else self.dice.randrange(-5, 400)

    def forget(self, sequence: Any) -> None:
        """Nothing is kept."""


class Failing(Knowing):
    """Fails every other time, in one of several ways."""

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        proposals = super().propose(wishes)
        if self.asked % 2:
            return proposals
        if self.asked % 4:
            raise RuntimeError("as planned")
        return proposals[1:]


class AnyLengths:
    """Implements Lengths by dice."""

    def __init__(self, seed: int = 0) -> None:
        self.dice = Random(seed)

    def waits(self, rows: int, rates: Sequence[float], most: Sequence[int]) -> bool:
        return self.dice.random() < 0.7

    def choose(self, rows: int, rates: Sequence[float], most: Sequence[int]) -> list[int]:
        return [self.dice.randint(0, each) if each > 0 else 0 for each in most]

    def measured(self, step: StepTime) -> None:
        """Nothing is learned."""


def drafting_of(engine: Harness) -> Drafting:
    drafting: Drafting | None = engine.backend._loaded.engine.drafting
    assert drafting
    return drafting


def draft(engine: Harness, drafter: Any, lengths: Lengths) -> Drafting:
    """Replaces the source of drafts of a worker that has not begun."""
    drafting = drafting_of(engine)
    if drafter:
        drafting.drafter = drafter
    drafting.lengths = lengths
    return drafting


Source = Callable[[Known, int], Any]
SOURCES: dict[str, Source] = {
    "ngram": lambda _known, _seed: None,
    "absurd": lambda _known, seed: Knowing({}, 0.0, seed),
    "perfect": lambda known, seed: Knowing(known, 1.0, seed),
    "often right": lambda known, seed: Knowing(known, 0.8, seed),
    "failing": lambda known, seed: Failing(known, 0.9, seed),
}
"""Makes a drafter from the tokens to come and a seed; None is that of the settings."""
