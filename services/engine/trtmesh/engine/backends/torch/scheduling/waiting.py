"""The sequences that wait to start, the lowest rank first."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from trtmesh.engine.backends.torch.scheduling.sequence import Sequence

REMOVED_ENTRIES = 64
"""Entries kept of sequences that were removed, beyond twice as many as sequences wait."""


class WaitingQueue:
    """A heap; whoever is removed while waiting stays in it for a while, where nobody sees it."""

    def __init__(self, waits: Callable[[Sequence], bool]) -> None:
        """`waits` tells the sequences that are there from those that were removed."""
        self._waits = waits
        self._heap: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> Sequence | None:
        """The sequence that is next; None if none waits."""
        while self._heap and not self._waits(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Takes out the first."""
        heapq.heappop(self._heap)

    def forget_removed(self, waiting: int) -> None:
        """To be called when one was removed and `waiting` are left: behind a first that is stuck none comes up."""
        if len(self._heap) > 3 * waiting + REMOVED_ENTRIES:
            self._heap = [entry for entry in self._heap if self._waits(entry[1])]
            heapq.heapify(self._heap)
