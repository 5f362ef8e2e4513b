"""Attention in tiles computes the same as attention in groups, and the same bits for any chunk and batch."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.compute.paged_attention import PagedAttention
from trtmesh.engine.backends.torch.compute.tiled_attention import TiledAttention
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache, KvShape
from trtmesh.engine.backends.torch.model.attention import Attention, Rule, StepTokens

KV_HEADS, HEADS, SIZE, LONGEST = 2, 6, 16, 400
RULES = {
    "plain": Rule(0.25, None, None, None),
    "window": Rule(0.25, 30, None, None),
    "long window": Rule(0.25, 200, None, None),
    "softcap": Rule(0.25, None, 5.0, None),
    "sinks": Rule(0.25, None, None, torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, 1.0])),
}


class Lab:
    """Sequences of random queries, keys and values."""

    def __init__(self, sequences: int, tokens_per_block: int, *, tiled: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        rows = sequences * LONGEST
        self.queries = torch.randn(rows, HEADS, SIZE, generator=generator) * 3
        self.kv = torch.randn(rows, 2 * KV_HEADS, SIZE, generator=generator)
        width = -(-LONGEST // tokens_per_block)
        self.tables = BlockTables(sequences, width)
        self.cache = KvCache(
            KvShape(1, KV_HEADS, SIZE),
            blocks=sequences * width,
            tokens_per_block=tokens_per_block,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        blocks = np.random.default_rng(2).permutation(sequences * width) + 1
        for sequence in range(sequences):
            slot = self.tables.take()
            self.tables.put(slot, 0, blocks[sequence * width : (sequence + 1) * width].tolist())
        self.attention: Attention = (
            TiledAttention(self.cache, self.tables)
            if tiled
            else PagedAttention(
                self.cache,
                self.tables,
                torch.float32,
                decode_copy_bytes=0,
                uses_fused=lambda _: False,
            )
        )

    def step(self, parts: list[tuple[int, int, int]], rule: Rule) -> list[Tensor]:
        """Attention of (sequence, start, count) parts, those of one token first and in order of their starts."""
        slots, starts, counts = (
            np.array(each, dtype=np.int64) for each in zip(*parts, strict=True)
        )
        singles = int((counts == 1).sum())
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in parts])
        owners = np.repeat(slots, counts)
        blocks = self.tables.rows[owners, positions // self.cache.tokens_per_block]
        token_rows = torch.from_numpy(self.cache.rows_of_tokens(blocks, positions).reshape(-1))
        self.attention.begin(StepTokens(slots, starts, counts, singles, token_rows))
        rows = torch.from_numpy(owners * LONGEST + positions)
        output = self.attention.attend_tokens(0, self.queries[rows], self.kv[rows], rule)
        return list(torch.split(output, counts.tolist()))

    def whole(self, sequence: int, length: int, rule: Rule) -> Tensor:
        (output,) = self.step([(sequence, 0, length)], rule)
        return output

    def in_parts(self, sequence: int, counts: list[int], rule: Rule) -> Tensor:
        starts = accumulate(counts, initial=0)
        parts = [(sequence, start, count) for start, count in zip(starts, counts, strict=False)]
        return torch.cat([self.step([part], rule)[0] for part in parts])


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("tokens_per_block", [16, 24, 300])
def test_the_result_is_that_of_attention_in_groups(rule: Rule, tokens_per_block: int) -> None:
    tiled, grouped = (Lab(3, tokens_per_block, tiled=tiled) for tiled in (True, False))
    for lab in (tiled, grouped):
        for sequence, length in ((0, 40), (1, 129), (2, 390)):
            lab.whole(sequence, length, rule)
    step = [(0, 40, 1), (1, 129, 1), (2, 390, 5)]
    for got, expected in zip(tiled.step(step, rule), grouped.step(step, rule), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_no_bit_depends_on_chunks_blocks_or_mates(rule: Rule) -> None:
    length = 300
    expected = Lab(3, 16, tiled=True).whole(2, length, rule)
    for counts in ([1] * 20 + [280], [127, 1, 1, 1, 170], [128, 172], [299, 1]):
        assert torch.equal(Lab(3, 24, tiled=True).in_parts(2, counts, rule), expected)
    lab = Lab(3, 16, tiled=True)
    for sequence, tokens in ((0, 20), (1, 290), (2, 299)):
        lab.whole(sequence, tokens, rule)
    mates = lab.step([(0, 20, 1), (1, 290, 1), (2, 299, 1)], rule)
    assert torch.equal(mates[2], expected[299:])
