"""Blocks by the hashes of their content, and the events about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from trtmesh.engine.backends.torch.memory.eviction import DEFAULT, Retention
from trtmesh.engine.kv_blocks import KvEventLog

CANDIDATES = 64
"""Most blocks compared token by token for partial reuse; the newest are."""


@dataclass(slots=True)
class _Entry:
    block: int
    block_hash: int
    parent_hash: int
    token_ids: list[int]
    retention: Retention = DEFAULT


class Published:
    """A one-to-one map of hashes and blocks."""

    def __init__(self, *, events: bool = True) -> None:
        self.events = KvEventLog(enabled=events)
        self._by_hash: dict[int, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        # Newest last.
        self._children: dict[int, dict[int, _Entry]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def hashes(self) -> list[int]:
        return list(self._by_hash)

    def find(self, block_hash: int) -> int | None:
        """The block published under a hash."""
        entry = self._by_hash.get(block_hash)
        return entry.block if entry else None

    def match_partly(self, parent_hash: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """The child of `parent_hash` with the longest beginning of `token_ids`, and its length; (0, 0) without any."""
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

    def add(self, block: int, block_hash: int, parent_hash: int, token_ids: list[int]) -> None:
        """Publishes a block under a new hash."""
        entry = _Entry(block, block_hash, parent_hash, token_ids)
        self._by_hash[block_hash] = self._by_block[block] = entry
        self._children.setdefault(parent_hash, {})[block_hash] = entry
        self.events.stored(parent_hash, block_hash, token_ids)

    def rebind(self, block: int, other: int) -> None:
        """Moves the hash of a published block to `other`, which is unpublished."""
        entry = self._by_block[other] = self._by_block.pop(block)
        entry.block = other

    def remove(self, block: int) -> None:
        """Unpublishes a block."""
        entry = self._by_block.pop(block)
        del self._by_hash[entry.block_hash]
        siblings = self._children[entry.parent_hash]
        del siblings[entry.block_hash]
        if not siblings:
            del self._children[entry.parent_hash]
        self.events.removed([entry.block_hash])

    def retention(self, block: int) -> Retention:
        """The retention of a published block."""
        return self._by_block[block].retention

    def retain(self, block: int, retention: Retention) -> None:
        """Sets the retention of a block, if published, from its next release on."""
        entry = self._by_block.get(block)
        if entry:
            entry.retention = retention
