"""Attention of a flat batch by kernels with access to the pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.decode_attention import (
    DecodeWorkspace,
    decode_attention,
    most_shared_rows,
)
from trtmesh.engine.backends.torch.cuda.kernels.pages import Pages, TableRows
from trtmesh.engine.backends.torch.cuda.kernels.prefill_attention import (
    prefill_attention,
    tiles_of,
)
from trtmesh.engine.backends.torch.cuda.kernels.store import store_tokens
from trtmesh.engine.backends.torch.cuda.step_inputs import ChunkInputs, GraphAttention, StepInputs
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.attention import Angles, Rule, StepTokens


class KernelAttention(GraphAttention):
    """New tokens by a kernel with rotation and store; chunks by another, in tiles."""

    def __init__(self, cache: KvCache, tables: BlockTables) -> None:
        super().__init__(cache)
        self._pages = Pages(cache.pool)
        self._tables = tables.rows
        self._workspace: DecodeWorkspace | None = None
        self._rows: tuple[StepInputs, int] | None = None
        self._chunks: Chunks | None = None

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        super().begin(step, written)
        self._rows, self.turns = None, False
        self._chunks = _chunks_of(step, self._tables, self.cache)

    def begin_rows(self, inputs: StepInputs, rows: int) -> None:
        # Rows of one sequence read each other's keys and values.
        self._rows, self.turns = (inputs, rows), not inputs.are_runs

    def begin_chunks(self, inputs: ChunkInputs, size: int) -> None:
        self._rows, self.turns = None, False
        self._chunks = Chunks(None, inputs.table, inputs.tiles(size), inputs.rows(size))

    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        if self._rows:
            return self._attend_rows(layer, queries, kv, rule, None)
        chunks = self._chunks
        assert chunks
        if chunks.static:
            store_tokens(kv, chunks.static, self._pages, layer)
        else:
            self._write(layer, kv)
        singles = len(chunks.rows[0]) if chunks.rows else 0
        if chunks.rows and singles == len(queries):
            return self._decode(layer, queries, kv, chunks.rows, rule, writes=False)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if chunks.rows:
            output[:singles] = self._decode(
                layer, queries[:singles], kv[:singles], chunks.rows, rule, writes=False
            )
        prefill_attention(queries, chunks.tiles, chunks.table, self._pages, layer, rule, output)
        return output

    def attend_turning(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, angles: Angles
    ) -> Tensor:
        return self._attend_rows(layer, queries, kv, rule, angles)

    def _attend_rows(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, angles: Angles | None
    ) -> Tensor:
        assert self._rows
        inputs, count = self._rows
        if inputs.are_runs:
            store_tokens(kv, inputs.rows(count), self._pages, layer)
        rows = inputs.positions[:count], inputs.table, inputs.width
        writes = not inputs.are_runs
        return self._decode(layer, queries, kv, rows, rule, writes=writes, angles=angles)

    def _decode(
        self,
        layer: int,
        queries: Tensor,
        kv: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        rule: Rule,
        *,
        writes: bool,
        angles: Angles | None = None,
    ) -> Tensor:
        if self._workspace is None:
            most = most_shared_rows(self._pages.kv_heads)
            self._workspace = DecodeWorkspace(
                queries.shape[1], self._pages, most, self.cache.pool.device
            )
        return decode_attention(
            queries,
            kv,
            *rows,
            self._pages,
            layer,
            rule,
            self._workspace,
            writes=writes,
            angles=(angles[0][0], angles[1][0]) if angles else None,
        )


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where the tokens of a step are, on the device."""

    rows: tuple[Tensor, Tensor, Tensor] | None
    """Positions, table and the table's width, for the leading sequences with a single token; None without any."""
    table: Tensor
    """[sequences, width]"""
    tiles: Tensor
    """Of the other sequences, [tiles, 4]; see `tiles_of`."""
    static: TableRows | None = None
    """All tokens of a graph; None where the step says where they are stored."""


def _chunks_of(step: StepTokens, tables: np.ndarray, cache: KvCache) -> Chunks:
    device, singles = cache.pool.device, step.singles
    ends = step.starts + step.counts
    width = int(-(-ends.max() // cache.tokens_per_block))
    table = torch.from_numpy(tables[step.slots, :width]).to(device)
    rows = None
    if singles:
        positions = torch.from_numpy(step.starts[:singles]).to(device)
        rows = (positions, table, torch.tensor([width], device=device))
    starts, counts = step.starts[singles:].tolist(), step.counts[singles:].tolist()
    tiles = tiles_of(starts, counts, first_row=singles, first=singles)
    return Chunks(rows, table, torch.tensor(tiles, dtype=torch.int64, device=device).view(-1, 4))
