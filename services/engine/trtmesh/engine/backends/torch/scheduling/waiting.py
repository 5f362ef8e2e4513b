"""The sequences that wait to start."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from trtmesh.engine.backends.torch.scheduling.sequence import Sequence

REMOVED_ENTRIES = 64
"""Entries of removed sequences to keep beyond twice as many as there are waiting sequences."""


class WaitingQueue:
    """The lowest rank first. Removed sequences stay until they surface or until `tidy` finds too many."""

    def __init__(self, lives: Callable[[Sequence], bool]) -> None:
        self._lives = lives
        self._heap: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> Sequence | None:
        """None where no sequence waits."""
        while self._heap and not self._lives(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def tidy(self, waiting: int) -> None:
        """Drops removed sequences where they outnumber the `waiting`: a first that is stuck lets none surface."""
        if len(self._heap) > 3 * waiting + REMOVED_ENTRIES:
            self._heap = [entry for entry in self._heap if self._lives(entry[1])]
            heapq.heapify(self._heap)
