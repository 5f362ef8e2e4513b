"""The KV blocks as numbers: references, reusable KV, and the order of eviction. No tensors here.

    empty ──allocate──▶ held ──release──▶ empty                 (never published)
                          └──release──▶ idle ──hold──▶ held     (published under a hash)
                                         ├──allocate──▶ held    (evicted, hash forgotten)
                                         └──allocate──▶ held    (evicted, content moved to the host under its hash)
    host ──begin──▶ held                                        (copied back)

Block 0 is never allocated: it pads block tables and stays zero. Blocks 1 to `total_blocks` are on the device, the
following `host_blocks` in host memory, where nothing is computed.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from trtmesh.chassis.frozen import frozen
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import KvEvent
from trtmesh.engine.ledger import KvEventLog

DEFAULT_PRIORITY = 35
"""The priority without a wish, as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A `priority` from 0 to 100, held for `seconds` from the moment the block first becomes idle; None: no limit."""

    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None
    expiry: float | None = None
    """The end of the seconds, once these began; later use of the block does not move the end."""


DEFAULT = Retention()


class EvictionOrder:
    """Numbers of idle blocks: the lowest priority goes first, and among equals the least recently added.

    An expired priority becomes the default, and the block counts as added at this moment, as in TensorRT-LLM.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[int, OrderedDict[int, None]] = {}
        self._retention_of: dict[int, Retention] = {}
        # Discarded numbers stay and are skipped when their time comes.
        self._expiries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._retention_of)

    def __contains__(self, number: int) -> bool:
        return number in self._retention_of

    def add(self, number: int, retention: Retention) -> None:
        """Adds a new number as the last of the priority."""
        self._expire()
        if retention.seconds is None or retention.priority == DEFAULT_PRIORITY:
            self._queue(number, retention)
            return
        now = self._clock()
        expiry = now + retention.seconds if retention.expiry is None else retention.expiry
        if expiry <= now:
            self._queue(number, DEFAULT)
            return
        self._queue(number, replace(retention, expiry=expiry))
        heapq.heappush(self._expiries, (expiry, number))
        self._tidy()

    def discard(self, number: int) -> Retention:
        """Removes a number; returns the retention, the default once expired."""
        self._expire()
        return self._unqueue(number)

    def pop(self) -> tuple[int, Retention]:
        """Removes the first number; returns the number and its retention."""
        self._expire()
        number = next(iter(self._queues[min(self._queues)]))
        return number, self._unqueue(number)

    def _queue(self, number: int, retention: Retention) -> None:
        self._retention_of[number] = retention
        self._queues.setdefault(retention.priority, OrderedDict())[number] = None

    def _unqueue(self, number: int) -> Retention:
        retention = self._retention_of.pop(number)
        queue = self._queues[retention.priority]
        del queue[number]
        if not queue:
            del self._queues[retention.priority]
        return retention

    def _expire(self) -> None:
        if not self._expiries:
            return
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expiry, number = heapq.heappop(self._expiries)
            retention = self._retention_of.get(number)
            if retention and retention.expiry == expiry:
                self._unqueue(number)
                self._queue(number, DEFAULT)

    def _tidy(self) -> None:
        if len(self._expiries) > 2 * len(self._retention_of) + 64:
            self._expiries = [
                (retention.expiry, number)
                for number, retention in self._retention_of.items()
                if retention.expiry is not None
            ]
            heapq.heapify(self._expiries)


NULL_BLOCK = 0
CANDIDATES = 64
"""Most blocks compared token by token for partial reuse; the newest are."""


@frozen
class Move:
    """Copies block `source` to block `target`. A copy of the null block clears the target."""

    source: int
    target: int


@frozen
class Prefix:
    """KV for the beginning of a sequence: full blocks to share, and a partial block to copy."""

    blocks: list[int]
    tokens: int
    """Tokens covered, with the partial block."""
    partial: int = NULL_BLOCK


class BlockPool:
    """Blocks with reference counts.

    A published block without references stays idle until EvictionOrder names the block. A chain is released from the
    end, so among equals a child is evicted before the parent.
    """

    def __init__(
        self,
        total_blocks: int,
        *,
        host_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_blocks = total_blocks
        self.host_blocks = host_blocks
        self.published = Published()
        # Of held blocks.
        self._references: dict[int, int] = {}
        # Those from `_unused` on were never allocated.
        self._empty: list[int] = []
        self._unused = 1
        self._idle = EvictionOrder(clock)
        self._host_empty = list(range(total_blocks + host_blocks, total_blocks, -1))
        self._host = EvictionOrder(clock)
        self._moves: list[Move] = []

    @property
    def free_blocks(self) -> int:
        """Device blocks without references."""
        return len(self._empty) + self.total_blocks + 1 - self._unused + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Device blocks held by sequences and leases."""
        return self.total_blocks - self.free_blocks

    @property
    def used_host_blocks(self) -> int:
        return self.host_blocks - len(self._host_empty)

    def can_allocate(self, count: int, *, beside: Prefix | None = None) -> bool:
        """Whether `count` blocks can be allocated in addition to the prefix `beside`."""
        if beside:
            count += sum(1 for block in beside.blocks if self._takes_one(block))
            count += beside.partial in self._idle
        return count <= self.free_blocks

    def begin(self, prefix: Prefix) -> list[int]:
        """Returns blocks with the tokens of `prefix`, each with a new reference; check `can_allocate` first."""
        # Held first: the allocations below must not evict these blocks.
        sources = [*prefix.blocks, prefix.partial] if prefix.partial else prefix.blocks
        for block in sources:
            if self._is_host(block):
                self.published.retain(block, self._host.discard(block))
            else:
                self.hold([block])
        away = [block for block in prefix.blocks if self._is_host(block)]
        back = dict(zip(away, self._allocate(len(away)), strict=True))
        for place, block in back.items():
            self._moves.append(Move(place, block))
            self.published.rebind(place, block)
            self._host_empty.append(place)
        blocks = [back.get(block, block) for block in prefix.blocks]
        if prefix.partial:
            blocks.append(self.copy(prefix.partial))
            if self._is_host(prefix.partial):
                self._host.add(prefix.partial, self.published.retention(prefix.partial))
            else:
                self.release([prefix.partial])
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a reference to held or published device blocks."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            held = self._references.get(block, 0)
            if not held:
                self.published.retain(block, self._idle.discard(block))
            self._references[block] = held + 1

    def allocate(self, count: int) -> list[int]:
        """Returns cleared blocks with a reference each; check `can_allocate` first."""
        blocks = self._allocate(count)
        self._moves += [Move(NULL_BLOCK, block) for block in blocks]
        return blocks

    def copy(self, block: int) -> int:
        """Returns a copy of `block` with a reference; check `can_allocate` first."""
        (copy,) = self._allocate(1)
        self._moves.append(Move(block, copy))
        return copy

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each of a sequence's blocks."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                if block in self.published:
                    self._idle.add(block, self.published.retention(block))
                else:
                    self._empty.append(block)

    def publish(
        self,
        block: int,
        block_hash: int,
        parent_hash: int,
        token_ids: list[int],
        adapter: Adapter | None = None,
    ) -> None:
        """Publishes a full held block under a hash, unless a device block is published so already."""
        if block in self.published:
            return
        there = self.published.find(block_hash)
        if there is None:
            self.published.add(block, block_hash, parent_hash, token_ids, adapter)
        elif self._is_host(there):
            self._host.discard(there)
            self.published.rebind(there, block)
            self._host_empty.append(there)

    def retain(self, block_hash: int, retention: Retention) -> None:
        """Sets the retention of the block published under a hash, if any."""
        block = self.published.find(block_hash)
        if block is None:
            return
        self.published.retain(block, retention)
        order = self._host if self._is_host(block) else self._idle
        if block in order:
            order.discard(block)
            order.add(block, retention)

    def is_shared(self, block: int) -> bool:
        """Whether a held block may have other readers."""
        return block in self.published or self._references.get(block, 0) > 1

    def retract(self, blocks: Iterable[int]) -> None:
        """Unpublishes held blocks with bad content."""
        for block in blocks:
            if block in self.published:
                self.published.remove(block)

    def take_events(self) -> list[KvEvent]:
        """Returns the changes of published blocks since the last call."""
        return self.published.events.take()

    def take_moves(self) -> list[Move]:
        """Returns the moves to carry out before the next step, in order."""
        moves, self._moves = self._moves, []
        return moves

    def _is_host(self, block: int) -> bool:
        return block > self.total_blocks

    def _takes_one(self, block: int) -> bool:
        """Whether a prefix with `block` costs a free block."""
        return self._is_host(block) or block in self._idle

    def _allocate(self, count: int) -> list[int]:
        empty = min(count, len(self._empty))
        blocks = [self._empty.pop() for _ in range(empty)]
        unused = range(self._unused, min(self._unused + count - empty, self.total_blocks + 1))
        self._unused = unused.stop
        blocks += unused
        blocks += [self._evict() for _ in range(count - len(blocks))]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, retention = self._idle.pop()
        offloads = retention.priority >= DEFAULT_PRIORITY
        place = self._host_place() if offloads else NULL_BLOCK
        if place:
            self._moves.append(Move(block, place))
            self.published.rebind(block, place)
            self._host.add(place, retention)
        else:
            self.published.remove(block)
        return block

    def _host_place(self) -> int:
        """Returns an empty place in host memory; the null block without any."""
        if self._host_empty:
            return self._host_empty.pop()
        if not len(self._host):
            return NULL_BLOCK
        place, _ = self._host.pop()
        self.published.remove(place)
        return place


@dataclass(slots=True)
class _Entry:
    block: int
    block_hash: int
    parent_hash: int
    token_ids: list[int]
    retention: Retention = DEFAULT


class Published:
    """A one-to-one map of hashes and blocks, and the events about changes."""

    def __init__(self) -> None:
        self.events = KvEventLog()
        self._by_hash: dict[int, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        # Newest last.
        self._children: dict[int, dict[int, _Entry]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, block_hash: int) -> int | None:
        entry = self._by_hash.get(block_hash)
        return entry.block if entry else None

    def match_partly(self, parent_hash: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """The child of `parent_hash` with the longest beginning of `token_ids`, and the length of this beginning; (0,
        0) without any."""
        best, most = 0, 0
        children = self._children.get(parent_hash, {})
        for entry in islice(reversed(children.values()), CANDIDATES):
            pairs = zip(entry.token_ids, token_ids, strict=False)
            equal = next(
                (count for count, (one, other) in enumerate(pairs) if one != other),
                min(len(entry.token_ids), len(token_ids)),
            )
            if equal > most:
                best, most = entry.block, equal
        return best, most

    def add(
        self,
        block: int,
        block_hash: int,
        parent_hash: int,
        token_ids: list[int],
        adapter: Adapter | None = None,
    ) -> None:
        """Publishes a block under a new hash."""
        entry = _Entry(block, block_hash, parent_hash, token_ids)
        self._by_hash[block_hash] = self._by_block[block] = entry
        self._children.setdefault(parent_hash, {})[block_hash] = entry
        self.events.stored(parent_hash, block_hash, token_ids, adapter)

    def rebind(self, block: int, other: int) -> None:
        """Moves the hash of a published block to the unpublished block `other`."""
        entry = self._by_block[other] = self._by_block.pop(block)
        entry.block = other

    def remove(self, block: int) -> None:
        entry = self._by_block.pop(block)
        del self._by_hash[entry.block_hash]
        siblings = self._children[entry.parent_hash]
        del siblings[entry.block_hash]
        if not siblings:
            del self._children[entry.parent_hash]
        self.events.removed([entry.block_hash])

    def retention(self, block: int) -> Retention:
        return self._by_block[block].retention

    def retain(self, block: int, retention: Retention) -> None:
        """Sets the retention of a block, if published, from the next release on."""
        entry = self._by_block.get(block)
        if entry:
            entry.retention = retention


class Tables(Protocol):
    """The places of a batch, each with the blocks of a sequence."""

    @property
    def free_slots(self) -> int: ...

    def take(self) -> int:
        """Returns a free place; check `free_slots` first."""

    def put(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Sets the blocks of a place from the `first` on."""

    def replace(self, slot: int, blocks: Sequence[int]) -> None:
        """Sets all blocks of a place."""

    def give_back(self, slot: int) -> None: ...
