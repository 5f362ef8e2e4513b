"""Sequences in a fixed order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from trtmesh.engine.backends.torch.scheduling.sequence import Sequence

REMOVED_ENTRIES = 64
"""Entries of removed sequences to keep beyond twice as many as there are living sequences."""


class SequenceHeap:
    """The lowest first. Removed sequences stay until they surface or until `tidy` finds too many."""

    def __init__(self, lives: Callable[[Sequence], bool]) -> None:
        self._lives = lives
        self._numbers = count()
        self._heap: list[tuple[Any, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, order: float | tuple[int, int], sequence: Sequence) -> None:
        """Among equals the first pushed comes first."""
        heapq.heappush(self._heap, (order, next(self._numbers), sequence))

    def first(self) -> Sequence | None:
        """None where no sequence is left."""
        while self._heap and not self._lives(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def tidy(self, living: int) -> None:
        """Drops the removed sequences where they outnumber the `living`: a first that is stuck lets none surface."""
        if len(self._heap) > 3 * living + REMOVED_ENTRIES:
            self._heap = [entry for entry in self._heap if self._lives(entry[2])]
            heapq.heapify(self._heap)
