"""Blocks expected on workers soon, forgotten by age in two generations."""

from __future__ import annotations

import sys
from collections.abc import Sequence

LIFE_SECONDS = 5.0
"""Longest life of an entry, and twice the shortest: enough for the worker's own event to arrive."""

MOST_BLOCKS = 131_072
"""Entries of both generations before the older is dropped early."""


class RecentBlocks:
    """Two generations of block → bits of workers. The older is dropped as a whole once the younger is old enough."""

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._born = float("-inf")

    @property
    def approximate_bytes(self) -> int:
        return sys.getsizeof(self._young) + sys.getsizeof(self._old)

    def add(self, bit: int, hashes: Sequence[int], now: float) -> None:
        young, _ = self.at(now)
        if len(young) + len(hashes) > MOST_BLOCKS // 2:
            self._turn(now)
            young = self._young
        for block in hashes:
            young[block] = young.get(block, 0) | bit

    def at(self, now: float) -> tuple[dict[int, int], dict[int, int]]:
        """The younger and the older generation at a time."""
        age = now - self._born
        if age >= LIFE_SECONDS:
            self._turn(now)
            self._old = {}
        elif age >= LIFE_SECONDS / 2:
            # As if called in time, so that idle time does not prolong an entry's life.
            self._turn(self._born + LIFE_SECONDS / 2)
        return self._young, self._old

    def clear(self, bit: int) -> None:
        """Forgets the blocks of a worker."""
        for generation in (self._young, self._old):
            for block, mask in [*generation.items()]:
                if mask & bit:
                    generation[block] = mask & ~bit

    def _turn(self, now: float) -> None:
        self._young, self._old, self._born = {}, self._young, now
