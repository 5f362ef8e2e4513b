"""Decode commands that a tokenizer has not answered yet, and whether it still answers at all."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from trtmesh.router.streams.sequence import SequenceRun

LOOKS = 10
"""Looks that a command may survive before its tokenizer counts as frozen."""


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """A DecodeCommand on its way: how many tokens of each sequence, and the sequences that it finishes."""

    counts: list[tuple[SequenceRun, int]]
    finished: list[SequenceRun]


class Unanswered:
    """The commands, oldest first.

    Tokens are answered at once, so an answer that does not come means a frozen process or a silent network. What the
    oldest command waits is counted in looks: a router that stood still itself looks once, and blames nobody.
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
        """The one that an answer belongs to."""
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
        """Whether the oldest waits too long."""
        return self._looks >= LOOKS

    @property
    def timely(self) -> bool:
        """Whether nothing waits half as long as would be too long."""
        return self._looks < LOOKS // 2
