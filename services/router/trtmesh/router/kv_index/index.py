"""Names of a prompt's KV blocks, and the workers that hold each, as bits of an integer."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count

from trtmesh.chassis.block_hashes import chain, root_hash
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig

MOST_BLOCKS = 1_000_000
"""Blocks of workers remembered, of about 250 bytes each; the least recently used are evicted."""

TOUCH_FROM = 0.5
"""Fill level from where on lookups refresh blocks in the eviction order."""

NUMBER_BYTES = sys.getsizeof(2**63)

RECENT_SECONDS = 5.0
"""Longest life of an expected block, and twice the shortest: enough for the worker's own event to arrive."""

MOST_RECENT = 131_072
"""Expected blocks of both generations before the older one is dropped early."""

MOST_LEFT = 256
"""Workers that left before their bits are taken out of the expected blocks, where time does not end these."""


class RecentBlocks:
    """Blocks expected on workers soon: two generations of block → bits of workers. The older is dropped
    as a whole once the younger is old enough."""

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._born = float("-inf")
        self._left = self._left_before = 0

    @property
    def left(self) -> int:
        """Bits of workers that left, which a generation may still have: of no meaning, and not to be used anew."""
        return self._left | self._left_before

    @property
    def approximate_bytes(self) -> int:
        return sys.getsizeof(self._young) + sys.getsizeof(self._old)

    def add(self, bit: int, hashes: Sequence[int], now: float) -> None:
        young, _ = self.at(now)
        if len(young) + len(hashes) > MOST_RECENT // 2:
            self._turn(now)
            young = self._young
        for block in hashes:
            young[block] = young.get(block, 0) | bit

    def at(self, now: float) -> tuple[dict[int, int], dict[int, int]]:
        """The younger and the older generation at a time."""
        age = now - self._born
        if age >= RECENT_SECONDS:
            self._turn(now)
            self._old = {}
        elif age >= RECENT_SECONDS / 2:
            # As if called in time, so that idle time does not prolong an entry's life.
            self._turn(self._born + RECENT_SECONDS / 2)
        return self._young, self._old

    def leave(self, bit: int) -> None:
        """Forgets a worker. Its bits stay for a while: to look at every block for each worker of a lost rack would hold
        up all streams."""
        self._left |= bit
        if self.left.bit_count() >= MOST_LEFT:
            for generation in (self._young, self._old):
                for block, mask in [*generation.items()]:
                    generation[block] = mask & ~self.left
            self._left = self._left_before = 0

    def _turn(self, now: float) -> None:
        self._young, self._old, self._born = {}, self._young, now
        self._left, self._left_before = 0, self._left


class KvIndex:
    """Blocks of every worker, from KV events and from this router's placements of the last seconds.

    Holds at most `max_blocks`, counting a block once per holder. Least recently used blocks are evicted, whichever
    worker holds them; the index then underestimates the workers' caches, never the reverse.
    """

    def __init__(self, max_blocks: int = MOST_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._held: dict[str, set[int]] = {}
        self._slots: dict[str, int] = {}
        self._addresses: dict[int, str] = {}
        self._recent = RecentBlocks()
        self.size = 0

    def __len__(self) -> int:
        return self.size

    @property
    def approximate_bytes(self) -> int:
        """Memory of the tables and their numbers, of which the bits of workers grow with their number."""
        tables = sys.getsizeof(self._blocks) + sum(map(sys.getsizeof, self._held.values()))
        bits = max(NUMBER_BYTES, sys.getsizeof(1 << len(self._slots)))
        return tables + (NUMBER_BYTES + bits) * len(self._blocks) + self._recent.approximate_bytes

    def store(self, address: str, hashes: Sequence[int]) -> None:
        """Adds blocks of a worker, parents before children."""
        bit = 1 << self._slot(address)
        held, blocks = self._held[address], self._blocks
        before = len(held)
        held.update(hashes)
        self.size += len(held) - before
        # Reversed, so that the end of a chain is evicted first.
        for block in reversed(hashes):
            blocks[block] = blocks.get(block, 0) | bit
        if self.size > self._max_blocks:
            self._evict()

    def remove(self, address: str, hashes: Iterable[int]) -> None:
        """Removes blocks of a worker."""
        held = self._held.get(address)
        if held is None:
            return
        bit = 1 << self._slots[address]
        for block in hashes:
            if block in held:
                held.discard(block)
                self._clear(block, bit)

    def clear(self, address: str) -> None:
        """Removes all blocks of a worker."""
        self.remove(address, [*self._held.get(address, ())])

    def forget(self, address: str) -> None:
        """Removes a worker."""
        if address in self._slots:
            self.clear(address)
            slot = self._slots.pop(address)
            self._recent.leave(1 << slot)
            del self._addresses[slot], self._held[address]

    def expect(self, address: str, hashes: Sequence[int], now: float) -> None:
        """Adds blocks of a dispatched prompt, for the seconds until the worker's own events."""
        self._recent.add(1 << self._slot(address), hashes, now)

    def match(self, hashes: Sequence[int], now: float) -> dict[str, int]:
        """Length of the prefix of `hashes` on each worker with any, including expected blocks."""
        blocks, (young, old) = self._blocks, self._recent.at(now)
        there = ~self._recent.left
        found: dict[str, int] = {}
        active, depth = -1, 0
        for depth, block in enumerate(hashes):
            here = blocks.get(block, 0)
            if young or old:
                here |= (young.get(block, 0) | old.get(block, 0)) & there
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
            left = self._recent.left
            slot = next(n for n in count() if n not in self._addresses and not left >> n & 1)
            self._slots[address] = slot
            self._addresses[slot] = address
            self._held[address] = set()
        return slot

    def _names(self, mask: int) -> Iterable[str]:
        while mask:
            lowest = mask & -mask
            yield self._addresses[lowest.bit_length() - 1]
            mask ^= lowest


BEYOND_TOKENS = ("prompt_tuning.", "multimodal.", "encoder_decoder.")
"""Groups of fields with an effect on a prompt's KV beyond the token ids."""


def prefix_root(config: GenerationConfig, adapter: Adapter | None = None) -> int | None:
    """Parent of a prompt's first block; None for KV not reused or not determined by the tokens.

    `adapter` is the config's adapter in the workers' version.
    """
    if not config.kv_cache.reuse:
        return None
    if _is_beyond_tokens(config.fields_set):
        return None
    if config.lora is None:
        return root_hash(config.kv_cache.salt)
    if adapter is None:
        return None
    return root_hash(config.kv_cache.salt, adapter=adapter)


@lru_cache(maxsize=256)
def _is_beyond_tokens(fields: frozenset[str]) -> bool:
    return any(path.startswith(BEYOND_TOKENS) for path in fields)


class PromptBlocks:
    """Hashes of a prompt's full blocks, computed on first use for each block size."""

    def __init__(self, root: int | None, token_ids: Sequence[int]) -> None:
        self._root = root
        self._token_ids = token_ids
        self._by_size: dict[int, list[int]] = {}
        self.prompt_tokens = len(token_ids)

    def hashes(self, tokens_per_block: int) -> list[int]:
        """A hash per full block; empty without reusable KV."""
        if self._root is None or tokens_per_block < 1:
            return []
        known = self._by_size.get(tokens_per_block)
        if known is None:
            known = chain(self._root, self._token_ids, tokens_per_block)
            self._by_size[tokens_per_block] = known
        return known
