"""Attention of a flat batch by kernels with access to the pages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.compute.paged_attention import CachedAttention
from trtmesh.engine.backends.torch.cuda.kernels.attention import (
    MOST_SPLITS,
    NewTokens,
    RunWorkspace,
)
from trtmesh.engine.backends.torch.cuda.kernels.decode_attention import decode_attention
from trtmesh.engine.backends.torch.cuda.kernels.invariant_attention import (
    RUN,
    attend_chunks,
    attend_tokens,
)
from trtmesh.engine.backends.torch.cuda.kernels.pages import (
    Pages,
    TableRows,
    store_tokens,
)
from trtmesh.engine.backends.torch.cuda.kernels.prefill_attention import (
    prefill_attention,
    tiles_of,
)
from trtmesh.engine.backends.torch.cuda.step_inputs import ChunkInputs, StepInputs
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.attention import Angles, Rule, StepTokens


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where the tokens of a step are, on the device."""

    tiles: Tensor
    """[tiles, 4]; see `tiles_of`."""
    table: Tensor
    """[sequences, width]"""
    width: Tensor
    """[1]"""
    singles: NewTokens | None = None
    """The leading tokens, in no tile; None without any."""
    static: TableRows | None = None
    """All tokens of a graph; None where the step says where they are stored."""


class GraphAttention(CachedAttention):
    """Attention of a step of any chunks, and of the static inputs of graphs."""

    tiles_singles: ClassVar[bool]
    """Whether sequences with a single token have tiles like others."""
    _kernel: ClassVar[Callable[..., Tensor]]
    """Attends new tokens."""

    def __init__(self, cache: KvCache, tables: BlockTables, most_runs: int) -> None:
        """`most_runs` is the number of runs of the longest sequence."""
        super().__init__(cache)
        self._most_runs = most_runs
        self._workspace: RunWorkspace | None = None
        self._pages = Pages(cache.pool)
        self._tables = tables.rows
        self._rows: tuple[StepInputs, int] | None = None
        self._chunks: Chunks | None = None

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        super().begin(step, written)
        self._rows, self.turns = None, False
        self._chunks = self._chunks_of(step)

    def begin_rows(self, inputs: StepInputs, rows: int) -> None:
        """Prepares for forwards over the first `rows` of a graph's inputs, a new token each."""
        # Rows of one sequence read each other's keys and values.
        self._rows, self.turns = (inputs, rows), not inputs.are_runs

    def begin_chunks(self, inputs: ChunkInputs, size: int) -> None:
        """Prepares for forwards over the first `size` tokens of a graph's inputs."""
        self._rows, self.turns = None, False
        rows = inputs.rows(size)
        self._chunks = Chunks(inputs.tiles(size), rows.table, rows.width, static=rows)

    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        if self._rows:
            return self._attend_rows(layer, queries, kv, rule)
        chunks = self._chunks
        assert chunks
        if chunks.static:
            store_tokens(kv, chunks.static, self._pages, layer)
        else:
            self._write(layer, kv)
        return self._attend_chunks(layer, queries, kv, rule, chunks)

    def attend_turning(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, angles: Angles
    ) -> Tensor:
        return self._attend_rows(layer, queries, kv, rule, (angles[0][0], angles[1][0]))

    @abstractmethod
    def _attend_chunks(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, chunks: Chunks
    ) -> Tensor:
        """As `attend_tokens`, with the keys and values stored."""

    def _attend_new(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, new: NewTokens
    ) -> Tensor:
        """As `attend_tokens`."""
        if self._workspace is None:
            heads, device = queries.shape[1], self.cache.pool.device
            self._workspace = RunWorkspace(heads, self._pages, self._most_runs, device)
        return self._kernel(queries, kv, new, self._pages, layer, rule, self._workspace)

    def _attend_rows(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, angles: Angles | None = None
    ) -> Tensor:
        assert self._rows
        inputs, count = self._rows
        rows = inputs.rows(count)
        if inputs.are_runs:
            store_tokens(kv, rows, self._pages, layer)
        new = NewTokens(rows.positions, rows.table, rows.width, not inputs.are_runs, angles)
        return self._attend_new(layer, queries, kv, rule, new)

    def _chunks_of(self, step: StepTokens) -> Chunks:
        device, singles = self.cache.pool.device, 0 if self.tiles_singles else step.singles
        width = int(-(-(step.starts + step.counts).max() // self.cache.tokens_per_block))
        starts, counts = step.starts[singles:].tolist(), step.counts[singles:].tolist()
        tiles = tiles_of(starts, counts, first_row=singles, first=singles)
        table = torch.from_numpy(self._tables[step.slots, :width]).to(device)
        on_device, new = torch.tensor([width], device=device), None
        if singles:
            positions = torch.from_numpy(step.starts[:singles]).to(device)
            new = NewTokens(positions, table, on_device, writes=False)
        on_tiles = torch.tensor(tiles, dtype=torch.int64, device=device).view(-1, 4)
        return Chunks(on_tiles, table, on_device, new)


class KernelAttention(GraphAttention):
    """New tokens by a kernel with rotation and store; chunks by another, in tiles."""

    tiles_singles = False
    _kernel = staticmethod(decode_attention)

    def __init__(self, cache: KvCache, tables: BlockTables) -> None:
        super().__init__(cache, tables, MOST_SPLITS)

    def _attend_chunks(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, chunks: Chunks
    ) -> Tensor:
        singles = chunks.singles
        if singles and len(singles.positions) == len(queries):
            return self._attend_new(layer, queries, kv, rule, singles)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if singles:
            count = len(singles.positions)
            output[:count] = self._attend_new(layer, queries[:count], kv[:count], rule, singles)
        prefill_attention(queries, chunks.tiles, chunks.table, self._pages, layer, rule, output)
        return output


class InvariantAttention(GraphAttention):
    """No influence of the batch, or of the chunks of a prompt, on the result for a token: the new tokens of a graph
    together, and all else in tiles."""

    tiles_singles = True
    _kernel = staticmethod(attend_tokens)

    def __init__(self, cache: KvCache, tables: BlockTables) -> None:
        positions = tables.rows.shape[1] * cache.tokens_per_block
        super().__init__(cache, tables, -(-positions // RUN))

    def _attend_chunks(
        self, layer: int, queries: Tensor, kv: Tensor, rule: Rule, chunks: Chunks
    ) -> Tensor:
        return attend_chunks(
            queries, chunks.tiles, chunks.table, chunks.width, self._pages, layer, rule
        )
