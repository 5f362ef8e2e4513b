"""Attention without influence of the batch, or of the chunks of a prompt, on the result for a token, to the last bit.

Keys are taken in tiles at fixed positions, whatever the blocks of the cache. Each product has at least LEAST_ROWS rows,
because fewer rows take other kernels. A tile hidden from a token changes nothing: the weights are 0 and the factor is
1. Everything is computed in float32, from the cache, where even the step's own keys and values may be rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from trtmesh.engine.backends.torch.compute.paged_attention import CachedAttention
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache, Rows
from trtmesh.engine.backends.torch.model.attention import Rule, StepTokens
from trtmesh.engine.scheduling.blocks import NULL_BLOCK

TILE = 128
"""Keys of a tile."""
LEAST_ROWS = 8
LEAST = -1e30
"""Below any score; finite, so hidden tiles make no NaN."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Keys at TILE positions, for the sequences of a group from `first` on."""

    first: int
    rows: Tensor
    """[2 * sequences * kv_heads * blocks]"""
    gathered: int
    """Keys of each sequence in these blocks."""
    offset: int
    """The first of them in the tile."""
    mask: Tensor | None
    """Added to scores, [sequences, 1, 1 or tokens * shared heads, TILE]."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equally many tokens in the step, in ascending order of their lengths."""

    tokens: slice
    sequences: int
    tiles: list[_Tile]


class TiledAttention(CachedAttention):
    def __init__(self, cache: KvCache, tables: BlockTables) -> None:
        super().__init__(cache)
        self._tables = tables.rows
        self._groups: dict[tuple[int | None, int], list[_Group]] = {}

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        super().begin(step, written)
        self._groups = {}

    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        step = self._write(layer, kv)
        shared = queries.shape[1] // self.cache.shape.kv_heads
        key = (rule.window, shared)
        if key not in self._groups:
            self._groups[key] = list(self._plan(step, rule.window, shared))
        outputs = [
            self._attend_group(layer, group, queries[group.tokens], rule, shared)
            for group in self._groups[key]
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_group(
        self, layer: int, group: _Group, queries: Tensor, rule: Rule, shared: int
    ) -> Tensor:
        """`queries` [tokens, heads, head_dim]; query heads of the same key head become rows of a matrix."""
        heads, size = self.cache.shape.kv_heads, self.cache.shape.head_dim
        split = queries.view(group.sequences, -1, heads, shared, size).transpose(1, 2)
        packed = split.reshape(group.sequences * heads, -1, size).float().mul(rule.scale)
        rows = packed.shape[1]
        sums = _Sums(pad(packed, (0, 0, 0, -rows % LEAST_ROWS)), heads, rule.softcap)
        for tile in group.tiles:
            sums.add(tile, *self._keys_and_values(layer, tile))
        if rule.sinks is not None:
            sums.add_sinks(rule.sinks.float().view(heads, shared), rows)
        output = sums.result()[:, :rows].view(group.sequences, heads, -1, shared, size)
        return output.transpose(1, 2).reshape(queries.shape).to(queries.dtype)

    def _keys_and_values(self, layer: int, tile: _Tile) -> tuple[Tensor, Tensor]:
        """[sequences * kv_heads, TILE, head_dim] each."""
        size = self.cache.shape.head_dim
        gathered = self.cache.block_rows[layer].index_select(0, tile.rows).float()
        per_head = gathered.view(2, -1, tile.gathered, size).narrow(2, tile.offset, TILE)
        return per_head[0], per_head[1]

    def _plan(self, step: StepTokens, window: int | None, shared: int) -> Iterator[_Group]:
        """All sequences with a single token are a group, and each other sequence."""
        groups = [slice(0, step.singles)] if step.singles else []
        groups += [slice(place, place + 1) for place in range(step.singles, len(step.slots))]
        token = 0
        for group in groups:
            starts, count = step.starts[group], int(step.counts[group.start])
            tokens = slice(token, token + count * len(starts))
            token = tokens.stop
            tiles = self._tiles(step.slots[group], starts, count, window, shared)
            yield _Group(tokens, len(starts), list(tiles))

    def _tiles(
        self, slots: Rows, starts: Rows, count: int, window: int | None, shared: int
    ) -> Iterator[_Tile]:
        begin = 0 if window is None else max(0, int(starts[0]) - window + 1) // TILE * TILE
        for key in range(begin, int(starts[-1]) + count, TILE):
            # Shorter sequences come first and have no such keys.
            first = int(np.searchsorted(starts + count, key, side="right"))
            blocks, offset = self._blocks(slots[first:], key)
            positions = starts[first:, None] + np.arange(count)
            yield _Tile(
                first,
                torch.from_numpy(self.cache.rows_of_blocks(blocks).reshape(-1)),
                blocks.shape[1] * self.cache.tokens_per_block,
                offset,
                _mask(positions, key, window, shared),
            )

    def _blocks(self, slots: Rows, key: int) -> tuple[Rows, int]:
        """The blocks [sequences, blocks] of a tile, and the tile's offset in the first."""
        size = self.cache.tokens_per_block
        places = np.arange(key // size, -(-(key + TILE) // size))
        known = places < self._tables.shape[1]
        blocks = np.full((len(slots), len(places)), NULL_BLOCK, dtype=np.int64)
        blocks[:, known] = self._tables[slots[:, None], places[known]]
        return blocks, key % size


def _mask(positions: Rows, key: int, window: int | None, shared: int) -> Tensor | None:
    """[sequences, 1, rows, TILE] for the tokens at `positions` [sequences, tokens]; None where all keys are seen."""
    keys = np.arange(key, key + TILE)
    hidden: NDArray[np.bool_] = keys > positions[..., None]
    if window is not None:
        hidden |= keys <= positions[..., None] - window
    if not hidden.any():
        return None
    if positions.shape[1] > 1:
        hidden = hidden.repeat(shared, axis=1)
        missing = -hidden.shape[1] % LEAST_ROWS
        hidden = np.pad(hidden, ((0, 0), (0, missing), (0, 0)))
    mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
    return torch.from_numpy(mask)[:, None]


class _Sums:
    """Weighted values of all tiles so far, relative to the highest score so far."""

    def __init__(self, queries: Tensor, heads: int, softcap: float | None) -> None:
        """`queries` are [sequences * kv_heads, rows, head_dim]."""
        self._queries = queries
        self._heads = heads
        self._softcap = softcap
        self._highest = queries.new_full((*queries.shape[:2], 1), LEAST)
        self._weight = torch.zeros_like(self._highest)
        self._values = torch.zeros_like(queries)

    def add(self, tile: _Tile, keys: Tensor, values: Tensor) -> None:
        """`keys` and `values` are [sequences * kv_heads, TILE, head_dim]."""
        own = slice(tile.first * self._heads, None)
        scores = torch.bmm(self._queries[own], keys.transpose(1, 2))
        if self._softcap is not None:
            scores = scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if tile.mask is not None:
            scores.view(-1, self._heads, *scores.shape[1:]).add_(tile.mask)
        highest = torch.maximum(self._highest[own], scores.amax(dim=2, keepdim=True))
        weights = scores.sub_(highest).exp_()
        self._rescale(own, highest)
        self._weight[own].add_(weights.sum(dim=2, keepdim=True))
        self._values[own].add_(torch.bmm(weights, values))

    def add_sinks(self, sinks: Tensor, rows: int) -> None:
        """`sinks` [kv_heads, shared heads] take weight and add no value; `rows` are not padding."""
        shared = sinks.shape[1]
        scores = self._highest.new_full(self._highest.shape, LEAST)
        by_token = scores.view(-1, self._heads, *scores.shape[1:])[:, :, :rows]
        by_token.view(len(by_token), self._heads, -1, shared).copy_(sinks[:, None])
        highest = torch.maximum(self._highest, scores)
        self._rescale(slice(None), highest)
        self._weight.add_(scores.sub_(highest).exp_())

    def _rescale(self, own: slice, highest: Tensor) -> None:
        factor = (self._highest[own] - highest).exp_()
        self._weight[own].mul_(factor)
        self._values[own].mul_(factor)
        self._highest[own] = highest

    def result(self) -> Tensor:
        """[sequences * kv_heads, rows, head_dim]"""
        return self._values / self._weight
