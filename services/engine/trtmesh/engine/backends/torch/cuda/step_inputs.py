"""The static inputs of captured steps, each filled by one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.pages import TableRows
from trtmesh.engine.backends.torch.cuda.kernels.prefill_attention import TILE, tiles_of
from trtmesh.engine.backends.torch.cuda.pinned import ALIGNED, StagedWords, aligned
from trtmesh.engine.backends.torch.cuda.ruled_rows import Numbers, RuledRows, SlotRows
from trtmesh.engine.backends.torch.memory.kvcache import Rows
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence
from trtmesh.engine.scheduling.blocks import NULL_BLOCK

HEADER = ALIGNED
ROW_FIELDS = 4


class StepInputs:
    """Rows of a new token each. `table` has `width` [1] blocks a row, as many as the longest sequence of the step
    needs: a copy takes no more than a step needs. For negative token ids see `known_tokens`."""

    def __init__(
        self,
        tables: Rows,
        tokens_per_block: int,
        rules: RuledRows,
        device: torch.device,
        most_run_rows: int = 0,
    ) -> None:
        """`tables` are the rows of the BlockTables. With `most_run_rows`, there are up to so many rows, and several may
        be of one sequence."""
        self._tables = tables
        self.rules = rules
        self._tokens_per_block = tokens_per_block
        self._most = aligned(most_run_rows or len(tables))
        self.are_runs = most_run_rows > 0
        self._staged = StagedWords(HEADER + self._most * (ROW_FIELDS + tables.shape[1]), device)
        buffer = self._staged.buffer
        self.width = buffer[:1]
        fields = buffer[HEADER : HEADER + ROW_FIELDS * self._most].view(ROW_FIELDS, self._most)
        self.token_ids, self.positions, self.places = fields[0], fields[1], fields[2]
        self.temperatures = fields[3].view(torch.float64)
        self.table = buffer[HEADER + ROW_FIELDS * self._most :]
        self._owners = torch.arange(self._most, device=device)

    def rows(self, count: int) -> TableRows:
        return TableRows(self.positions[:count], self._owners[:count], self.table, self.width)

    def fill(
        self,
        chunks: SequenceOf[Chunk],
        rows: int,
        token_ids: SequenceOf[int],
        before: int | Numbers = 0,
    ) -> SlotRows:
        """Takes a token for each chunk, after `before` more than its sequence has; the rest of the `rows` have the null
        block and store nothing. The token -1 - n is that chosen by the device in row n. Returns the rules of the
        chunks."""
        count, most = len(chunks), self._most
        found = self.rules.find([chunk.sequence for chunk in chunks])
        starts = [chunk.start for chunk in chunks]
        width = max(starts) // self._tokens_per_block + 1
        words = self._staged.begin()
        words[0] = width
        fields = words[HEADER : HEADER + ROW_FIELDS * most].reshape(ROW_FIELDS, most)
        fields[:, :rows] = 0
        fields[0, :count] = token_ids
        fields[1, :count] = starts
        places, temperatures = self.rules.draws(found, before)
        fields[2, :count] = places
        fields[3].view(np.float64)[:count] = temperatures
        first = HEADER + ROW_FIELDS * most
        table = words[first : first + rows * width].reshape(rows, width)
        table[:count] = self._tables[found.slots, :width]
        table[count:] = NULL_BLOCK
        self._staged.send(first + rows * width)
        return found


MOST_CHUNKS = 16
KEPT_FIELDS = 3
TOKEN_FIELDS = 3
TILE_WORDS = 4

Words = TypeVar("Words", Rows, Tensor)


class ChunkInputs:
    """The tokens of chunks in a row. A chunk has a row of `table` [1 + chunks, width]; row 0 has the null block, for
    filling tokens without a store or a tile."""

    def __init__(
        self,
        tables: Rows,
        tokens_per_block: int,
        most_tokens: int,
        rules: RuledRows,
        device: torch.device,
    ) -> None:
        """`tables` are the rows of the BlockTables."""
        self._tables = tables
        self._rules = rules
        self._tokens_per_block = tokens_per_block
        width = tables.shape[1]
        kept = KEPT_FIELDS * aligned(MOST_CHUNKS)
        tiles = aligned(_most_tiles(most_tokens) * TILE_WORDS)
        self._most = aligned(most_tokens)
        self._first_tile = kept
        self._first_field = kept + tiles
        self._first_row = self._first_field + TOKEN_FIELDS * self._most
        self._staged = StagedWords(self._first_row + (1 + MOST_CHUNKS) * width, device)
        kept_fields, self._tiles, fields, self.table = self._parts(self._staged.buffer)
        self.kept_rows, self.places = kept_fields[0], kept_fields[1]
        self.temperatures = kept_fields[2].view(torch.float64)
        self.token_ids, self.positions, self._owners = fields
        self._width = torch.tensor([width], device=device)

    def rows(self, size: int) -> TableRows:
        """The tokens of a graph with `size` tokens."""
        return TableRows(self.positions[:size], self._owners[:size], self.table, self._width)

    def tiles(self, size: int) -> Tensor:
        """The tiles of a graph with `size` tokens, [tiles, 4], see `tiles_of`; some have no tokens."""
        return self._tiles[: _most_tiles(size)]

    def fill(self, chunks: SequenceOf[Chunk], size: int) -> SlotRows:
        """Takes the tokens of chunks for a graph with `size` tokens. `kept_rows` are the last tokens of completing
        chunks, in order; `places` and `temperatures` belong to the draws. Returns the rules of these chunks."""
        kept_fields, tiles, fields, table = self._parts(self._staged.begin())
        token_ids, positions, owners = fields
        kept: list[tuple[int, Sequence]] = []
        first = 0
        table[0] = NULL_BLOCK
        for row, chunk in enumerate(chunks, 1):
            last, end = first + chunk.count, chunk.start + chunk.count
            token_ids[first:last] = chunk.sequence.tokens[chunk.start : end]
            positions[first:last] = np.arange(chunk.start, end)
            owners[first:last] = row
            width = -(-end // self._tokens_per_block)
            table[row, :width] = self._tables[chunk.sequence.slot, :width]
            if chunk.completes:
                kept.append((last - 1, chunk.sequence))
            first = last
        fields[:, first:size] = 0
        kept_fields[:] = 0
        kept_fields[0, : len(kept)] = [row for row, _ in kept]
        found = self._rules.find([sequence for _, sequence in kept])
        places, temperatures = self._rules.draws(found)
        kept_fields[1, : len(kept)] = places
        kept_fields[2].view(np.float64)[: len(kept)] = temperatures
        starts, counts = [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
        used = tiles_of(starts, counts, first_row=1, first=0)
        tiles[: len(used)] = used
        # A tile without tokens reads and stores nothing.
        tiles[len(used) : _most_tiles(size)] = 0
        self._staged.send(self._first_row + (1 + len(chunks)) * self._tables.shape[1])
        return found

    def _parts(self, words: Words) -> tuple[Words, Words, Words, Words]:
        """Fields of kept rows, tiles, fields of tokens and table, as views."""
        width = self._tables.shape[1]
        return (
            words[: self._first_tile].reshape(KEPT_FIELDS, -1)[:, :MOST_CHUNKS],
            words[self._first_tile : self._first_field].reshape(-1, TILE_WORDS),
            words[self._first_field : self._first_row].reshape(TOKEN_FIELDS, self._most),
            words[self._first_row :].reshape(-1, width),
        )


def _most_tiles(tokens: int) -> int:
    """Of up to MOST_CHUNKS chunks with so many tokens together."""
    return tokens // TILE + MOST_CHUNKS
