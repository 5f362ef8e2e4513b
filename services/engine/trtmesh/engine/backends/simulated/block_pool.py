"""The KV blocks of a simulated worker: private to a sequence, shared by their hash, or idle and kept for reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Counts blocks; there is no content.

    A shared block has a reference count; at 0 it is idle and the one idle longest is evicted first. A sequence holds
    the whole chain before a block that it holds, and releases it from the end, so a child is evicted before its parent.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._private = 0
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.total_blocks - self.used_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self._private + len(self._references) - len(self._idle)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of the first of `hashes` are in the pool."""
        for count, block in enumerate(hashes):
            if block not in self._references:
                return count
        return len(hashes)

    def can_acquire(self, shared: Sequence[int], private: int) -> bool:
        """Whether `acquire` would find room."""
        woken = sum(1 for block in shared if block in self._idle)
        return private + woken <= self.free_blocks

    def acquire(self, shared: Sequence[int], private: int) -> list[int]:
        """Takes shared blocks that are in the pool and `private` new ones; returns the hashes evicted for them."""
        for block in shared:
            self._hold(block)
        evicted = []
        while self.total_blocks - self._private - len(self._references) < private:
            block, _ = self._idle.popitem(last=False)
            del self._references[block]
            evicted.append(block)
        self._private += private
        return evicted

    def share(self, hashes: Sequence[int]) -> list[bool]:
        """Turns as many private blocks of one sequence into shared ones; tells which of them are new to the pool.

        A block that is there already is held instead, and the private copy is freed.
        """
        self._private -= len(hashes)
        return [self._hold(block) for block in hashes]

    def release(self, shared: Sequence[int], private: int) -> None:
        """Gives back what a sequence holds."""
        self._private -= private
        for block in reversed(shared):
            self._references[block] -= 1
            if not self._references[block]:
                self._idle[block] = None

    def _hold(self, block: int) -> bool:
        """Adds a reference; tells whether the block is new to the pool."""
        count = self._references.get(block)
        self._references[block] = (count or 0) + 1
        if count == 0:
            del self._idle[block]
        return count is None
