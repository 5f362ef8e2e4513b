"""Which sequences are overdue."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from trtmesh.engine.backends.torch.scheduling.sequence import Sequence

OVER_DEADLINES = 64
"""Deadlines kept of sequences that are over, beyond as many as there are of living ones."""


class Deadlines:
    """The deadlines of sequences, earliest first; those of sequences that are over are forgotten in time."""

    def __init__(self, lives: Callable[[Sequence], bool]) -> None:
        self._lives = lives
        self._numbers = count()
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence, living: int) -> None:
        """Takes in that of a sequence, if it has one; `living` sequences there are."""
        if sequence.deadline is None:
            return
        heapq.heappush(self._heap, (sequence.deadline, next(self._numbers), sequence))
        if len(self._heap) > 2 * living + OVER_DEADLINES:
            self._heap = [each for each in self._heap if self._lives(each[2])]
            heapq.heapify(self._heap)

    def take(self, now: float) -> list[Sequence]:
        """The living sequences whose deadline has passed at `now` of the monotonic clock; each once."""
        overdue = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if self._lives(sequence):
                overdue.append(sequence)
        return overdue
