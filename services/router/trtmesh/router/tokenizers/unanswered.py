"""Decode commands without an answer: the test for a frozen tokenizer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from trtmesh.router.tokenizers.decoding import DecodedSequence

LOOKS = 10
"""Looks at the same unanswered command until the tokenizer counts as frozen."""


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """A DecodeCommand in flight: tokens per sequence, and finished sequences."""

    counts: list[tuple[DecodedSequence, int]]
    finished: list[DecodedSequence]


class Unanswered:
    """The commands in flight, oldest first.

    A tokenizer answers tokens at once, so a missing answer means a frozen process or a silent network. The age of the
    oldest command is counted in looks: a router that stood still looks once, and blames no tokenizer.
    """

    def __init__(self) -> None:
        self._batches: deque[DecodeBatch] = deque()
        self._looked_at: DecodeBatch | None = None
        self._looks = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: DecodeBatch) -> None:
        self._batches.append(batch)

    def take(self) -> DecodeBatch:
        """The batch of the next answer."""
        return self._batches.popleft()

    def clear(self) -> None:
        self._batches.clear()
        self.look()

    def look(self) -> None:
        oldest = self._batches[0] if self._batches else None
        self._looks = self._looks + 1 if oldest and oldest is self._looked_at else 0
        self._looked_at = oldest

    @property
    def overdue(self) -> bool:
        """Whether the oldest command is overdue."""
        return self._looks >= LOOKS

    @property
    def timely(self) -> bool:
        """Whether every command has been in flight for less than half the limit."""
        return self._looks < LOOKS // 2
