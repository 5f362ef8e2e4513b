"""The KV blocks as numbers: who holds which, and which hold KV that may be reused. No tensors here.

    empty ──allocate──▶ held ──release──▶ empty                 (never published)
                          └──release──▶ idle ──hold──▶ held     (published under a hash)
                                         └──allocate──▶ held    (evicted: its hash is forgotten)

Block 0 is never given out: it pads block tables and its content stays zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trtmesh.engine.backend import BlocksRemoved, BlocksStored, KvEvent

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Block `target` gets the content of `source`; that of the null block is zero."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV that a sequence may begin with: whole blocks to share, and one to copy for the `tokens` beyond them."""

    blocks: list[int]
    tokens: int
    """All tokens covered."""
    partial: int = NULL_BLOCK


class BlockPool:
    """Numbers 1 to `total_blocks` with reference counts.

    A published block that nobody holds stays idle until it is needed; the one idle longest is evicted first. Holders
    release a chain from its end, so that a child is evicted before its parent.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._references = [0] * (total_blocks + 1)
        self._empty = list(range(total_blocks, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._events: list[KvEvent] = []
        self._moves: list[Move] = []

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._empty) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.total_blocks - self.free_blocks

    def match(self, hashes: Iterable[int]) -> list[int]:
        """The blocks published under the first of `hashes`, up to the first that is not."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_allocate(self, count: int, *, beside: Prefix | None = None) -> bool:
        """Whether `count` blocks can be had once those of the prefix `beside` are held."""
        held = [*beside.blocks, beside.partial] if beside else ()
        woken = sum(1 for block in held if block in self._idle)
        return count + woken <= self.free_blocks

    def begin(self, prefix: Prefix) -> list[int]:
        """Blocks with one reference more that hold the tokens of `prefix`; ask `can_allocate` first."""
        self.hold(prefix.blocks)
        if not prefix.partial:
            return list(prefix.blocks)
        # Held so that the copy does not evict it.
        self.hold([prefix.partial])
        copy = self.copy(prefix.partial)
        self.release([prefix.partial])
        return [*prefix.blocks, copy]

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that are held or published."""
        for block in blocks:
            if not self._references[block]:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks of zeros with one reference; ask `can_allocate` first."""
        blocks = self._allocate(count)
        self._moves += [Move(NULL_BLOCK, block) for block in blocks]
        return blocks

    def copy(self, block: int) -> int:
        """A block with one reference and the content that `block` has now; ask `can_allocate` first."""
        (copy,) = self._allocate(1)
        self._moves.append(Move(block, copy))
        return copy

    def _allocate(self, count: int) -> list[int]:
        empty = min(count, len(self._empty))
        blocks = [self._empty.pop() for _ in range(empty)]
        blocks += [self._evict() for _ in range(count - empty)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a reference from each of a sequence's blocks."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._empty.append(block)

    def publish(self, block: int, block_hash: int, parent_hash: int, token_ids: list[int]) -> None:
        """Lets a full block be reused under its hash; one that is there under that hash already stays."""
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.block_hashes[-1] == parent_hash:
            last.block_hashes.append(block_hash)
            last.token_ids += token_ids
        else:
            self._events.append(BlocksStored(parent_hash, [block_hash], list(token_ids)))

    def retract(self, blocks: Iterable[int]) -> None:
        """Forgets the hashes of held blocks, whose content turned out to be useless."""
        for block in blocks:
            self._forget(block)

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call."""
        events, self._events = self._events, []
        return events

    def take_moves(self) -> list[Move]:
        """What is to be done to blocks before the next step, in this order."""
        moves, self._moves = self._moves, []
        return moves

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        del self._block_of[block_hash]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlocksRemoved([block_hash]))
