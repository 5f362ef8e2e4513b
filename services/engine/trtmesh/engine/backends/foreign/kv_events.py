"""A foreign engine's KV events under our names of blocks.

Engines hash blocks in ways of their own, and routers look prompts up by ours, which cover the tokens alone. So each
block is named anew by its tokens, and a table remembers the engine's name for the removal.
"""

from __future__ import annotations

from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2
from trtmesh.chassis.block_hashes import ROOT_HASH, chain
from trtmesh.engine.backend import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent

FULL_ATTENTION = "full_attention"


class ForeignBlocks:
    """Translates events. Blocks of adapters, salts, windows, other tiers or an unknown parent are left out, with those
    after them: a router that does not know of a block only misses a chance."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._ours: dict[int, int] = {}
        """Our name of each block, by the engine's."""

    def __len__(self) -> int:
        return len(self._ours)

    def translate(self, batch: common_pb2.KvEventBatch) -> list[KvEvent]:
        return [event for each in batch.events for event in self._event(each)]

    def clear(self) -> list[KvEvent]:
        """Forgets everything, after a gap."""
        had_some = bool(self._ours)
        self._ours.clear()
        return [BlocksCleared()] if had_some else []

    def _event(self, event: common_pb2.KvCacheEvent) -> Iterator[KvEvent]:
        match event.WhichOneof("data"):
            case "stored":
                yield from self._stored(event.stored)
            case "removed":
                yield from self._removed(event.removed)
            case "cleared":
                yield from self.clear()

    def _stored(self, stored: common_pb2.KvBlocksStored) -> Iterator[BlocksStored]:
        if not _of_tokens_alone(stored):
            return
        parent: int | None = ROOT_HASH
        if stored.HasField("parent_block_hash"):
            parent = self._ours.get(stored.parent_block_hash)
        told = BlocksStored(parent or ROOT_HASH, [], [])
        for block in stored.blocks:
            if parent is None or not self._is_plain(block):
                break
            (parent,) = chain(parent, block.token_ids, self._tokens_per_block)
            self._ours[block.block_hash] = parent
            told.block_hashes.append(parent)
            told.token_ids += block.token_ids
        if told.block_hashes:
            yield told

    def _removed(self, removed: common_pb2.KvBlocksRemoved) -> Iterator[BlocksRemoved]:
        if removed.tier > common_pb2.KV_CACHE_TIER_DEVICE:
            return
        known = [self._ours.pop(block, None) for block in removed.block_hashes]
        ours = [block for block in known if block is not None]
        if ours:
            yield BlocksRemoved(ours)

    def _is_plain(self, block: common_pb2.KvBlock) -> bool:
        size = self._tokens_per_block
        whole = block.block_size == size == len(block.token_ids)
        return whole and not (block.extra_keys or block.lora_id or block.cache_level)


def _of_tokens_alone(stored: common_pb2.KvBlocksStored) -> bool:
    kind = stored.kv_cache_spec_kind
    return (
        stored.tier <= common_pb2.KV_CACHE_TIER_DEVICE
        and stored.locality != common_pb2.KV_CACHE_LOCALITY_REMOTE
        and not (stored.lora_name or stored.cache_salt)
        and kind in ("", FULL_ATTENTION)
    )
