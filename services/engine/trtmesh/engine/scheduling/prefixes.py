"""Reuse of KV: finds blocks for the beginning of a sequence, and publishes blocks for others."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from trtmesh.chassis.block_hashes import extend_names
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, BlockPool, Prefix, Retention
from trtmesh.engine.scheduling.sequence import ScheduledSequence, SchedulingRules

NOTHING = Prefix([], 0)


class Prefixes:
    """Finds and publishes blocks. A token with needed logits is always computed."""

    def __init__(self, pool: BlockPool, rules: SchedulingRules) -> None:
        self._pool = pool
        self._rules = rules
        self._size = rules.tokens_per_block

    def find(self, sequence: ScheduledSequence) -> Prefix:
        """The longest beginning with KV, from the leader or from published blocks."""
        led = self.of_leader(sequence)
        published = self._published(sequence)
        return led if led.tokens >= published.tokens else published

    def of_leader(self, sequence: ScheduledSequence) -> Prefix:
        leader = sequence.leader
        if leader is None or leader.slot < 0:
            return NOTHING
        most = min(leader.num_computed, sequence.most_reusable)
        rest = range(min(leader.prompt_tokens, most), most)
        tokens = next((at for at in rest if leader.tokens[at] != sequence.tokens[at]), most)
        if self._rules.unseen_blocks(tokens) < leader.num_dropped:
            return NOTHING
        full, part = divmod(tokens, self._size)
        return Prefix(leader.blocks[:full], tokens, leader.blocks[full] if part else NULL_BLOCK)

    def named(self, hashes: SequenceOf[int], tokens: int) -> Prefix:
        """The longest beginning of `tokens` tokens published under `hashes`. The block of the last token is left out: a
        step writes to this block."""
        most = max(0, tokens - 1) // self._size if self._rules.prefix_reuse else 0
        blocks = self._match(list(hashes[:most]))
        return Prefix(blocks, len(blocks) * self._size)

    def publish(self, sequence: ScheduledSequence) -> None:
        """Publishes the blocks filled since the last call."""
        full = sequence.num_computed // self._size
        first, sequence.num_published = sequence.num_published, full
        if not self._reuses(sequence):
            return
        hashes = self._hashes(sequence, full)
        adapter = sequence.adapter.identity if sequence.adapter else None
        for number in range(first, full):
            parent = hashes[number - 1] if number else sequence.root
            tokens = sequence.tokens[number * self._size : (number + 1) * self._size]
            self._pool.publish(sequence.blocks[number], hashes[number], parent, tokens, adapter)
        self.retain(sequence, first, full)

    def retain(self, sequence: ScheduledSequence, first: int, last: int) -> None:
        """Sets the retention of published blocks [first, last) as the item asks, if at all."""
        wishes = sequence.config.kv_cache
        if not (wishes.token_ranges or wishes.decode_priority is not None):
            return
        if not self._reuses(sequence):
            return
        hashes = self._hashes(sequence, last)
        for number in range(first, last):
            retention = retention_of(sequence, number * self._size)
            if retention:
                self._pool.retain(hashes[number], retention)

    def _reuses(self, sequence: ScheduledSequence) -> bool:
        return self._rules.prefix_reuse and sequence.config.kv_cache.reuse

    def _published(self, sequence: ScheduledSequence) -> Prefix:
        if not self._reuses(sequence):
            return NOTHING
        size, last = self._size, sequence.most_reusable
        hashes = self._hashes(sequence, last // size)
        blocks = self._match(hashes[: last // size])
        tokens = len(blocks) * size
        if not self._rules.partial_reuse:
            return Prefix(blocks, tokens)
        parent = hashes[len(blocks) - 1] if blocks else sequence.root
        following = sequence.tokens[tokens : min(tokens + size, last)]
        partial, more = self._pool.published.match_partly(parent, following)
        return Prefix(blocks, tokens + more, partial)

    def _match(self, hashes: list[int]) -> list[int]:
        """Blocks of the longest published beginning; the null block where the next token does not see a block."""
        blocks: list[int] = []
        first = longest = 0
        for number, name in enumerate(hashes, start=1):
            block = self._pool.published.find(name)
            blocks.append(block or NULL_BLOCK)
            if block is None:
                if self._rules.window is None:
                    break
                first = number
            elif first <= self._rules.unseen_blocks(number * self._size):
                longest = number
        unseen = self._rules.unseen_blocks(longest * self._size)
        return [NULL_BLOCK] * unseen + blocks[unseen:longest]

    def _hashes(self, sequence: ScheduledSequence, count: int) -> list[int]:
        """Hashes of at least the first `count` blocks, all full."""
        return extend_names(sequence.hashes, sequence.root, sequence.tokens, self._size, count)


def retention_of(sequence: ScheduledSequence, token: int) -> Retention | None:
    """The retention for the block beginning at index `token`, as the item asks; None without a wish.

    In the prompt the first range around the token decides, after the prompt the decode priority.
    """
    wishes = sequence.config.kv_cache
    if token >= sequence.prompt_tokens:
        if wishes.decode_priority is None:
            return None
        return Retention(wishes.decode_priority, _seconds(wishes.decode_duration_ms))
    for each in wishes.token_ranges:
        if each.token_start <= token and (each.token_end is None or token < each.token_end):
            return Retention(each.priority, _seconds(each.duration_ms))
    return None


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
