"""Hands sequences over from one torch backend to another, with copies of memory in place of services and transport.

KV is copied at the news of each part, on the sender's thread in the middle of its step. Until then the receiver's
blocks hold NaN, so a part announced too early, or not at all, shows in the tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from engine.torch.harness import Harness, configure, running
from trtmesh.chassis.errors import QueueFull
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backend import (
    Awaiting,
    HandedOver,
    HandoffNews,
    Offered,
    PartFinal,
    Reserved,
    StepOutput,
)
from trtmesh.engine.handoff.block_plan import copies, problem_between
from trtmesh.engine.kv_memory import Bytes, KvMemory, Shard, Span

NAN = 0xFF
"""A number of these bytes is none, in every type."""

N = TypeVar("N", bound=HandoffNews)


class SplitMemory:
    """A pool presented as shards with equal ranges of its heads."""

    def __init__(self, whole: KvMemory, parts: int) -> None:
        self._whole = whole
        (shard,) = whole.shards
        heads = len(shard.kv_heads) // parts
        self.shards = tuple(
            Shard(
                shard.layers,
                range(first, first + heads),
                shard.tokens_per_block,
                shard.head_dim,
                shard.data_type,
                shard.element_bytes,
            )
            for first in range(0, len(shard.kv_heads), heads)
        )

    def read(self, shard: int, blocks: Sequence[int], span: Span, into: Bytes) -> None:
        rows = self._rows(blocks)[:, :, self._heads(shard)]
        into[:] = rows.reshape(len(blocks), -1)[:, span[0] : span[1]]

    def write(self, shard: int, blocks: Sequence[int], span: Span, data: Bytes) -> None:
        everything = self._rows(blocks)
        rows = everything[:, :, self._heads(shard)]
        flat = rows.reshape(len(blocks), -1).copy()
        flat[:, span[0] : span[1]] = data
        everything[:, :, self._heads(shard)] = flat.reshape(rows.shape)
        whole = self._whole.shards[0].block_bytes
        self._whole.write(0, blocks, (0, whole), everything.reshape(len(blocks), -1))

    def _heads(self, shard: int) -> slice:
        heads = self.shards[shard].kv_heads
        return slice(heads.start, heads.stop)

    def _rows(self, blocks: Sequence[int]) -> Bytes:
        """[blocks, layers * 2, kv_heads, bytes]"""
        (shard,) = self._whole.shards
        rows = np.empty((len(blocks), shard.block_bytes), dtype=np.uint8)
        self._whole.read(0, blocks, (0, shard.block_bytes), rows)
        return rows.reshape(len(blocks), 2 * len(shard.layers), len(shard.kv_heads), -1)


Memory = KvMemory | SplitMemory


def memory_of(engine: Harness, shards: int = 1) -> Memory:
    memory = engine.backend.kv_memory()
    assert memory
    return memory if shards == 1 else SplitMemory(memory, shards)


@dataclass
class Transfer:
    """Copies the parts of one lease as they are announced."""

    source: Memory
    target: Memory
    reserved: Reserved
    tokens: int
    offered: Offered | None = None
    parts: list[PartFinal] = field(default_factory=list)
    handed_over: HandedOver | None = None

    def fill(self, tokens: range, byte: int) -> None:
        """Overwrites the KV of tokens in the reserved blocks."""
        for shard, each in enumerate(self.target.shards):
            for copy in copies(each, each, tokens):
                blocks = [self.reserved.blocks[at] for at in copy.target_blocks]
                assert all(blocks)
                for run in copy.runs:
                    data = np.full((len(blocks), run.size), byte, dtype=np.uint8)
                    self.target.write(shard, blocks, (run.target, run.target + run.size), data)

    def take(self, news: HandoffNews) -> None:
        if isinstance(news, Offered):
            assert self.offered is None
            self.offered = news
            # Outside the window, a block stays as it was reserved.
            unseen = news.blocks.count(0) * self.source.shards[0].tokens_per_block
            self.fill(range(self.reserved.present_tokens, unseen), 0)
        elif isinstance(news, PartFinal):
            assert self.offered
            assert self.handed_over is None
            self.parts.append(news)
            self._copy(news, self.offered)
        elif isinstance(news, HandedOver):
            assert self.offered
            assert self.handed_over is None
            assert news.blocks == self.offered.blocks
            assert news.content.tokens == self.offered.tokens
            self.handed_over = news
            self._check_parts(news)

    def _copy(self, part: PartFinal, offered: Offered) -> None:
        assert not problem_between(self.source.shards, self.target.shards)
        layers = range(part.first_layer, part.first_layer + part.layers)
        for number, source in enumerate(self.source.shards):
            size = source.tokens_per_block
            last = min((part.first_block + part.blocks) * size, offered.tokens)
            tokens = range(max(part.first_block * size, self.reserved.present_tokens), last)
            for place, target in enumerate(self.target.shards):
                for copy in copies(source, target, tokens, layers):
                    from_blocks = [offered.blocks[at] for at in copy.source_blocks]
                    to_blocks = [self.reserved.blocks[at] for at in copy.target_blocks]
                    assert all(from_blocks)
                    assert all(to_blocks)
                    for run in copy.runs:
                        span = (run.source, run.source + run.size)
                        data = np.empty((len(from_blocks), run.size), dtype=np.uint8)
                        self.source.read(number, from_blocks, span, data)
                        span = (run.target, run.target + run.size)
                        self.target.write(place, to_blocks, span, data)

    def _check_parts(self, news: HandedOver) -> None:
        """Every block is announced once in every layer."""
        layers = len(self.source.shards[0].layers)
        announced = [
            (block, layer)
            for part in self.parts
            for block in range(part.first_block, part.first_block + part.blocks)
            for layer in range(part.first_layer, part.first_layer + part.layers)
        ]
        sent = [place for place, block in enumerate(news.blocks) if block]
        assert sorted(announced) == [(place, layer) for place in sent for layer in range(layers)]


def news_of(engine: Harness, kind: type[N], lease_id: str) -> N | None:
    found = (
        each for each in engine.handoffs if isinstance(each, kind) and each.lease_id == lease_id
    )
    return next(found, None)


async def told(engine: Harness, kind: type[N], lease_id: str) -> N:
    """Waits for the news of a lease."""
    await engine.until(lambda: news_of(engine, kind, lease_id) is not None)
    news = news_of(engine, kind, lease_id)
    assert news
    return news


class Workers:
    """Two backends of one model, each of them sender or receiver."""

    def __init__(self, one: Harness, other: Harness, shards: tuple[int, int] = (1, 1)) -> None:
        """`shards` are the numbers of shards in which they present their pools."""
        self.one, self.other = one, other
        self._memories = {one: memory_of(one, shards[0]), other: memory_of(other, shards[1])}
        self._numbers = count(1)
        self.transfers: dict[str, Transfer] = {}
        self._senders: dict[str, Harness] = {}
        for engine in (one, other):
            engine.on_output = partial(self.take, engine)

    def take(self, engine: Harness, output: StepOutput) -> None:
        """Copies the announced parts."""
        for each in output.handoffs:
            if self._senders.get(each.lease_id) is engine:
                self.transfers[each.lease_id].take(each)

    async def reserve(
        self, sender: Harness, receiver: Harness, tokens: int, hashes: Sequence[int] = ()
    ) -> str:
        """A lease with room for `tokens` tokens on the receiver; empty where the receiver has no room."""
        lease_id = f"lease-{next(self._numbers)}"
        receiver.backend.reserve(lease_id, tokens, hashes)
        reserved = await told(receiver, Reserved, lease_id)
        if reserved.error:
            assert isinstance(reserved.error, QueueFull)
            return ""
        memories = self._memories[sender], self._memories[receiver]
        transfer = self.transfers[lease_id] = Transfer(*memories, reserved, tokens)
        self._senders[lease_id] = sender
        transfer.fill(range(reserved.present_tokens, tokens), NAN)
        return lease_id

    async def decode(
        self,
        receiver: Harness,
        lease_id: str,
        prompt: Sequence[int],
        emitted: Sequence[int],
        config: GenerationConfig,
        *,
        batch_index: int = 0,
        sequence_index: int = 0,
    ) -> tuple[int, ...]:
        """Submits the item to the receiver, which adopts the blocks; the keys."""
        transfer = self.transfers[lease_id]
        handed_over = transfer.handed_over
        assert handed_over
        assert handed_over.emitted_tokens == len(emitted)
        assert handed_over.last_token == (emitted[-1] if emitted else None)
        end = max(handed_over.content.tokens, transfer.reserved.present_tokens)
        transfer.fill(range(end, transfer.tokens), 0)
        keys = receiver.submit(
            prompt,
            config,
            emitted=emitted,
            batch_index=batch_index,
            sequence_index=sequence_index,
            receiver_lease_id=lease_id,
        )
        awaiting = await told(receiver, Awaiting, lease_id)
        assert (awaiting.key, awaiting.content) == (keys[0], handed_over.content)
        receiver.backend.adopt(lease_id)
        self.drop(lease_id)
        return keys

    def drop(self, lease_id: str) -> None:
        """Drops the lease on both sides, as a router does at every end."""
        for engine in (self.one, self.other):
            engine.backend.drop(lease_id)


@asynccontextmanager
async def workers(
    folder: Path,
    one: dict[str, Any],
    other: dict[str, Any],
    shards: tuple[int, int] = (1, 1),
) -> AsyncIterator[Workers]:
    """Two started backends, whose blocks are all free in the end."""
    async with running(folder, **one) as first, running(folder, **other) as second:
        yield Workers(first, second, shards)
        for engine in (first, second):
            await engine.ended()
            assert engine.failures == []
            await check_free(engine)


async def check_free(engine: Harness) -> None:
    # Earlier commands are carried out first.
    await engine.ended(engine.submit([5], configure(max_tokens=1)))
    stats = engine.backend.stats()
    assert stats.used_blocks == stats.waiting_sequences == stats.running_sequences == 0
    assert stats.pending_prompt_tokens == stats.paused_sequences == 0
