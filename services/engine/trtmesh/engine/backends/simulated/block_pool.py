"""KV blocks of a simulated worker: private to a sequence, shared by hash, or idle and kept for reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Counts blocks without content.

    Shared blocks have a reference count; at 0 they are idle, and the longest idle block is evicted first. Sequences
    hold whole chains and release them from the end, so children are evicted before their parents.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._private = 0
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks without a holder."""
        return self.total_blocks - self.used_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks held by sequences."""
        return self._private + len(self._references) - len(self._idle)

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading hashes in the pool."""
        for count, block in enumerate(hashes):
            if block not in self._references:
                return count
        return len(hashes)

    def can_acquire(self, shared: Sequence[int], private: int) -> bool:
        """Whether `acquire` has room."""
        woken = sum(1 for block in shared if block in self._idle)
        return private + woken <= self.free_blocks

    def acquire(self, shared: Sequence[int], private: int) -> list[int]:
        """Holds shared blocks of the pool and `private` new blocks; returns the evicted hashes."""
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
        """Shares private blocks of a sequence under `hashes`; returns for each hash whether it is new to the pool.

        A known block is held instead, and the private copy is freed.
        """
        self._private -= len(hashes)
        return [self._hold(block) for block in hashes]

    def release(self, shared: Sequence[int], private: int) -> None:
        """Releases the blocks of a sequence."""
        self._private -= private
        for block in reversed(shared):
            self._references[block] -= 1
            if not self._references[block]:
                self._idle[block] = None

    def _hold(self, block: int) -> bool:
        """Adds a reference; returns whether the block is new to the pool."""
        count = self._references.get(block)
        self._references[block] = (count or 0) + 1
        if count == 0:
            del self._idle[block]
        return count is None
