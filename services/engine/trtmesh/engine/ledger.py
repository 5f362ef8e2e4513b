"""The live sequences of a backend, and what became known of them since the last delivery."""

from __future__ import annotations

from typing import Generic, TypeVar

from trtmesh.engine.backend import SequenceEnd, StepOutput

S = TypeVar("S")


class Ledger(Generic[S]):
    """Keeps what Backend promises about keys: each one that was added ends exactly once, with nothing after its end.

    A backend adds tokens, details and KV events to `output` as they become known, in a step or between two.
    """

    def __init__(self) -> None:
        self.live: dict[int, S] = {}
        self.output = StepOutput(0)

    def add(self, key: int, sequence: S) -> None:
        """A sequence of a taken item, or what stands for it."""
        self.live[key] = sequence

    def end(self, end: SequenceEnd) -> None:
        """Ends a live sequence; its blocks are free already."""
        del self.live[end.key]
        self.output.ends.append(end)

    def take(self, step_count: int) -> StepOutput:
        """Everything that became known since the last call."""
        output, self.output = self.output, StepOutput(0)
        output.step_count = step_count
        return output
