"""A copy of the KV cache's index, so that snapshots cost the backend nothing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import BlocksRemoved, BlocksStored, KvEvent
from trtmesh.engine.kv_blocks import KvEventLog


@dataclass(frozen=True, slots=True)
class _Block:
    parent: int
    token_ids: Sequence[int]
    adapter: Adapter | None


class KvMirror:
    """Numbers and applies KV events; holds at most one entry per block of the pool."""

    def __init__(self) -> None:
        self.epoch = secrets.randbits(63) | 1
        self.next_sequence = 0
        self.records = 0
        """Calls of `record`."""
        self._blocks: dict[int, _Block] = {}

    def record(self, events: Sequence[KvEvent]) -> int:
        """Applies events; returns the sequence number of the first."""
        first = self.next_sequence
        self.next_sequence += len(events)
        self.records += 1
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                for block in event.block_hashes:
                    self._blocks.pop(block, None)
            else:
                self._blocks.clear()
        return first

    def snapshot(self) -> list[KvEvent]:
        """Events that rebuild the present contents, parents before children."""
        log = KvEventLog()
        told: set[int] = set()
        for block in self._blocks:
            for link in self._untold_chain(block, told):
                entry = self._blocks[link]
                log.stored(entry.parent, link, entry.token_ids, entry.adapter)
        return log.take()

    def _store(self, event: BlocksStored) -> None:
        size = len(event.token_ids) // max(1, len(event.block_hashes))
        parent = event.parent_hash
        for number, block in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            self._blocks[block] = _Block(parent, tokens, event.adapter)
            parent = block

    def _untold_chain(self, block: int, told: set[int]) -> list[int]:
        """Stored ancestors of `block` and `block` itself, oldest first, without `told` blocks; adds them to `told`."""
        links = []
        while block in self._blocks and block not in told:
            told.add(block)
            links.append(block)
            block = self._blocks[block].parent
        return links[::-1]
