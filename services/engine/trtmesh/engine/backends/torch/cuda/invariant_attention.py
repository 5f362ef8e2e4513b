"""Attention without influence of the batch, or of the chunks of a prompt, on the result for a token, to the last bit.
Every token, decoded or of a prompt, is a row of the same kernel with the same tiling, and attends to the stored keys
before its position and to its own key. So a chunk is stored before the attention. A token of a prompt costs as much as
a decoded token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.decode_attention import (
    DecodeWorkspace,
    decode_attention,
    fixed_tiling,
)
from trtmesh.engine.backends.torch.cuda.kernels.pages import Pages, TableRows
from trtmesh.engine.backends.torch.cuda.kernels.store import store_tokens
from trtmesh.engine.backends.torch.cuda.step_inputs import ChunkInputs, GraphAttention, StepInputs
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.attention import Rule, StepTokens

ROWS_AT_ONCE = 256
"""Rows of a launch; each needs memory."""


class InvariantAttention(GraphAttention):
    """Attends row by row."""

    def __init__(self, cache: KvCache, tables: BlockTables) -> None:
        super().__init__(cache)
        self._pages = Pages(cache.pool)
        self._tables = tables.rows
        self._tiling = fixed_tiling(self._pages)
        self._own = torch.arange(len(tables.rows), device=cache.pool.device)
        self._workspace: DecodeWorkspace | None = None
        self._rows: TableRows | None = None
        self._is_static = False

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        super().begin(step, written)
        self._rows, self._is_static = self._rows_of(step), False

    def begin_rows(self, inputs: StepInputs, rows: int) -> None:
        positions, owners = inputs.positions[:rows], self._own[:rows]
        self._rows = TableRows(positions, owners, inputs.table, inputs.width)
        self._is_static = True

    def begin_chunks(self, inputs: ChunkInputs, size: int) -> None:
        self._rows, self._is_static = inputs.rows(size), True

    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        rows = self._rows
        assert rows
        if self._is_static:
            store_tokens(kv, rows, self._pages, layer)
        else:
            self._write(layer, kv)
        parts = [
            self._attend(layer, queries, kv, rule, rows, slice(first, first + ROWS_AT_ONCE))
            for first in range(0, len(queries), ROWS_AT_ONCE)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, rows: TableRows, part: slice
    ) -> Tensor:
        if self._workspace is None:
            self._workspace = DecodeWorkspace(
                queries.shape[1], self._pages, ROWS_AT_ONCE, self.cache.pool.device
            )
        return decode_attention(
            queries[part],
            kv[part],
            rows.positions[part],
            rows.table,
            rows.width,
            self._pages,
            layer,
            rule,
            self._workspace,
            writes=False,
            owners=rows.owners[part],
            tiling=self._tiling,
        )

    def _rows_of(self, step: StepTokens) -> TableRows:
        device, counts = self.cache.pool.device, step.counts
        before = np.cumsum(counts) - counts
        owners = np.repeat(np.arange(len(counts)), counts)
        positions = np.repeat(step.starts - before, counts) + np.arange(int(counts.sum()))
        width = int(-(-(step.starts + counts).max() // self.cache.tokens_per_block))
        return TableRows(
            torch.from_numpy(positions).to(device),
            torch.from_numpy(owners).to(device),
            torch.from_numpy(self._tables[step.slots, :width]).to(device),
            torch.tensor([width], device=device),
        )
