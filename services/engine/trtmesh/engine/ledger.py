"""The live sequences of a backend and its undelivered output."""

from __future__ import annotations

from typing import Generic, TypeVar

from trtmesh.engine.backend import SequenceEnd, StepOutput

S = TypeVar("S")


class Ledger(Generic[S]):
    """Keeps the promises of Backend about keys: each added key ends exactly once, with nothing after its end.

    A backend adds tokens and details to `output` as they become known, during a step or between two steps.
    """

    def __init__(self) -> None:
        self.live: dict[int, S] = {}
        self.output = StepOutput(0)

    def add(self, key: int, sequence: S) -> None:
        """Adds a key of an admitted item."""
        self.live[key] = sequence

    def end(self, end: SequenceEnd) -> None:
        """Ends a live key; the sequence's blocks must be free already."""
        del self.live[end.key]
        self.output.ends.append(end)

    def take(self, step_count: int) -> StepOutput:
        """Returns the output since the last call."""
        output, self.output = self.output, StepOutput(0)
        output.step_count = step_count
        return output
