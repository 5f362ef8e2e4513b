"""Attention of a flat batch without influence of the batch, or of the chunks of a prompt, on the result for a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.invariant_attention import (
    RunWorkspace,
    attend_chunks,
    attend_tokens,
)
from trtmesh.engine.backends.torch.cuda.kernels.pages import Pages, TableRows
from trtmesh.engine.backends.torch.cuda.kernels.prefill_attention import tiles_of
from trtmesh.engine.backends.torch.cuda.kernels.store import store_tokens
from trtmesh.engine.backends.torch.cuda.step_inputs import ChunkInputs, GraphAttention, StepInputs
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.attention import Angles, Rule, StepTokens


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Where the tokens of a step are, on the device."""

    tiles: Tensor
    """[tiles, 4]; see `tiles_of`."""
    table: Tensor
    """[sequences, width]"""
    width: Tensor
    static: TableRows | None
    """All tokens of a graph; None where the step says where they are stored."""


class InvariantAttention(GraphAttention):
    """The new tokens of a graph together, and all else in tiles."""

    def __init__(self, cache: KvCache, tables: BlockTables) -> None:
        super().__init__(cache)
        self._pages = Pages(cache.pool)
        self._tables = tables.rows
        self._workspace: RunWorkspace | None = None
        self._rows: tuple[StepInputs, int] | None = None
        self._chunks: _Chunks | None = None

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        super().begin(step, written)
        self._rows, self.turns = None, False
        device = self.cache.pool.device
        width = int(-(-(step.starts + step.counts).max() // self.cache.tokens_per_block))
        tiles = tiles_of(step.starts.tolist(), step.counts.tolist(), first_row=0, first=0)
        self._chunks = _Chunks(
            torch.tensor(tiles, device=device),
            torch.from_numpy(self._tables[step.slots, :width]).to(device),
            torch.tensor([width], device=device),
            None,
        )

    def begin_rows(self, inputs: StepInputs, rows: int) -> None:
        # Rows of one sequence read each other's keys and values.
        self._rows, self.turns = (inputs, rows), not inputs.are_runs

    def begin_chunks(self, inputs: ChunkInputs, size: int) -> None:
        self._rows, self.turns = None, False
        rows = inputs.rows(size)
        self._chunks = _Chunks(inputs.tiles(size), rows.table, rows.width, rows)

    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        if self._rows:
            return self._attend_rows(layer, queries, kv, rule, None)
        chunks = self._chunks
        assert chunks
        if chunks.static:
            store_tokens(kv, chunks.static, self._pages, layer)
        else:
            self._write(layer, kv)
        return attend_chunks(
            queries, chunks.tiles, chunks.table, chunks.width, self._pages, layer, rule
        )

    def attend_turning(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, angles: Angles
    ) -> Tensor:
        return self._attend_rows(layer, queries, kv, rule, (angles[0][0], angles[1][0]))

    def _attend_rows(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, angles: Angles | None
    ) -> Tensor:
        assert self._rows
        inputs, count = self._rows
        if inputs.are_runs:
            store_tokens(kv, inputs.rows(count), self._pages, layer)
        if self._workspace is None:
            positions = self._tables.shape[1] * self.cache.tokens_per_block
            self._workspace = RunWorkspace(
                queries.shape[1], self._pages, positions, self.cache.pool.device
            )
        return attend_tokens(
            queries, kv, inputs.positions[:count], inputs.table, inputs.width, self._pages, layer,
            rule, self._workspace, angles,
        )  # fmt: skip
