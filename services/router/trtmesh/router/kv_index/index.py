"""Blocks by hash, each with the workers that have it as the bits of an integer."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from trtmesh.router.kv_index.recent import RecentBlocks

TOUCH_FROM = 0.5
"""Share of the limit from which on lookups keep what they find from being evicted."""

NUMBER_BYTES = sys.getsizeof(2**63)


class KvIndex:
    """What every worker has, as far as it told, and what this router sent it in the last seconds.

    At most `max_blocks` blocks are held, a block that several workers have counted for each. Beyond it those that were
    stored or looked up longest ago go, whoever has them: the index then finds less than there is, never more.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._held: dict[str, set[int]] = {}
        self._slots: dict[str, int] = {}
        self._addresses: dict[int, str] = {}
        self._recent = RecentBlocks()
        self.size = 0
        self.evicted = 0

    def __len__(self) -> int:
        return self.size

    @property
    def approximate_bytes(self) -> int:
        """Memory of the tables and the numbers in them."""
        tables = sys.getsizeof(self._blocks) + sum(map(sys.getsizeof, self._held.values()))
        return tables + 2 * NUMBER_BYTES * len(self._blocks) + self._recent.approximate_bytes

    def holders(self, block: int) -> frozenset[str]:
        """Addresses of the workers that told that they have a block."""
        return frozenset(self._names(self._blocks.get(block, 0)))

    def store(self, address: str, hashes: Sequence[int]) -> None:
        """A worker has these blocks now; a parent comes before its children."""
        bit = 1 << self._slot(address)
        held, blocks = self._held[address], self._blocks
        before = len(held)
        held.update(hashes)
        self.size += len(held) - before
        # The other way round, so that of a chain the end is evicted first.
        for block in reversed(hashes):
            blocks[block] = blocks.get(block, 0) | bit
        if self.size > self._max_blocks:
            self._evict()

    def remove(self, address: str, hashes: Iterable[int]) -> None:
        """A worker has these blocks no more."""
        held = self._held.get(address)
        if held is None:
            return
        bit = 1 << self._slots[address]
        for block in hashes:
            if block in held:
                held.discard(block)
                self._clear(block, bit)

    def clear(self, address: str) -> None:
        """A worker has no block that is known."""
        self.remove(address, [*self._held.get(address, ())])

    def forget(self, address: str) -> None:
        """A worker is gone."""
        if address in self._slots:
            self.clear(address)
            slot = self._slots.pop(address)
            self._recent.clear(1 << slot)
            del self._addresses[slot], self._held[address]

    def expect(self, address: str, hashes: Sequence[int], now: float) -> None:
        """A worker will have these blocks soon, because of what was just sent to it; forgotten after some seconds,
        when its own events have told."""
        self._recent.add(1 << self._slot(address), hashes, now)

    def match(self, hashes: Sequence[int], now: float) -> dict[str, int]:
        """How many of the first of `hashes` each worker has or will have soon; workers that have none are left out."""
        blocks, (young, old) = self._blocks, self._recent.at(now)
        found: dict[str, int] = {}
        active, depth = -1, 0
        for depth, block in enumerate(hashes):
            here = blocks.get(block, 0)
            if young or old:
                here |= young.get(block, 0) | old.get(block, 0)
            if here & active != active:
                if depth:
                    for name in self._names(active & ~here):
                        found[name] = depth
                active &= here
                if not active:
                    break
        else:
            depth = len(hashes)
            if depth:
                for name in self._names(active):
                    found[name] = depth
        if found and self.size > TOUCH_FROM * self._max_blocks:
            self._touch(hashes[:depth])
        return found

    def _touch(self, hashes: Sequence[int]) -> None:
        for block in reversed(hashes):
            if block in self._blocks:
                self._blocks.move_to_end(block)

    def _evict(self) -> None:
        while self.size > self._max_blocks:
            block, mask = self._blocks.popitem(last=False)
            for name in self._names(mask):
                self._held[name].discard(block)
                self.size -= 1
                self.evicted += 1

    def _clear(self, block: int, bit: int) -> None:
        left = self._blocks[block] & ~bit
        if left:
            self._blocks[block] = left
        else:
            del self._blocks[block]
        self.size -= 1

    def _slot(self, address: str) -> int:
        slot = self._slots.get(address)
        if slot is None:
            slot = next(n for n in range(len(self._slots) + 1) if n not in self._addresses)
            self._slots[address] = slot
            self._addresses[slot] = address
            self._held[address] = set()
        return slot

    def _names(self, mask: int) -> Iterable[str]:
        while mask:
            lowest = mask & -mask
            yield self._addresses[lowest.bit_length() - 1]
            mask ^= lowest
