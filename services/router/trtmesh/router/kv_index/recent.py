"""Blocks that workers will have soon, forgotten by age and never one by one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

LIFE_SECONDS = 5.0
"""Entries live between half of this and all of it: long enough for the worker's own event to arrive."""

MOST_BLOCKS = 131_072
"""Entries of both generations; beyond it the older goes early."""


class RecentBlocks:
    """Two generations of block → bits of workers; the older is dropped as a whole when the younger is old enough."""

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
        """What is alive at a time: the younger and the older generation."""
        age = now - self._born
        if age >= LIFE_SECONDS:
            self._turn(now)
            self._old = {}
        elif age >= LIFE_SECONDS / 2:
            # As if it had been looked at in time: nothing lives longer because nobody looked.
            self._turn(self._born + LIFE_SECONDS / 2)
        return self._young, self._old

    def clear(self, bit: int) -> None:
        """Forgets one worker's blocks."""
        for generation in (self._young, self._old):
            for block, mask in [*generation.items()]:
                if mask & bit:
                    generation[block] = mask & ~bit

    def _turn(self, now: float) -> None:
        self._young, self._old, self._born = {}, self._young, now
