"""What the KV cache's reusable contents are, kept beside the backend so that a snapshot costs the backend nothing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.engine.backend import BlocksRemoved, BlocksStored, KvEvent


@dataclass(frozen=True, slots=True)
class _Block:
    parent: int
    token_ids: Sequence[int]
    adapter_id: int


class KvMirror:
    """Numbers KV events and knows what they add up to; holds at most one entry for each block of the pool."""

    def __init__(self) -> None:
        self.epoch = secrets.randbits(63) | 1
        self.next_sequence = 0
        self._blocks: dict[int, _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def record(self, events: Sequence[KvEvent]) -> int:
        """Takes events in; returns the sequence number of the first."""
        first = self.next_sequence
        self.next_sequence += len(events)
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                for block in event.block_hashes:
                    self._blocks.pop(block, None)
            else:
                self._blocks.clear()
        return first

    def snapshot(self) -> list[BlocksStored]:
        """Events that build what is stored now, parents before children."""
        events: list[BlocksStored] = []
        told: set[int] = set()
        for block in self._blocks:
            for link in self._untold_chain(block, told):
                self._append(events, link)
        return events

    def _store(self, event: BlocksStored) -> None:
        size = len(event.token_ids) // max(1, len(event.block_hashes))
        parent = event.parent_hash
        for number, block in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            self._blocks[block] = _Block(parent, tokens, event.adapter_id)
            parent = block

    def _untold_chain(self, block: int, told: set[int]) -> list[int]:
        """`block` and those of its ancestors that are stored and not yet told, eldest first; marks them as told."""
        links = []
        while block in self._blocks and block not in told:
            told.add(block)
            links.append(block)
            block = self._blocks[block].parent
        return links[::-1]

    def _append(self, events: list[BlocksStored], block: int) -> None:
        entry = self._blocks[block]
        last = events[-1] if events else None
        if last and last.block_hashes[-1] == entry.parent and last.adapter_id == entry.adapter_id:
            last.block_hashes.append(block)
            last.token_ids += entry.token_ids
        else:
            events.append(
                BlocksStored(entry.parent, [block], list(entry.token_ids), entry.adapter_id)
            )
