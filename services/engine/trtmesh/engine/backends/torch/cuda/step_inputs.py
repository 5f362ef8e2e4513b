"""The inputs of a captured step: one buffer on the device, filled by one copy from pinned memory."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from trtmesh.engine.backends.torch.memory.blocks import NULL_BLOCK
from trtmesh.engine.backends.torch.memory.kvcache import Rows
from trtmesh.engine.backends.torch.sampling.draws import places_of
from trtmesh.engine.backends.torch.sampling.filters import temperature_of
from trtmesh.engine.backends.torch.scheduling.sequence import Chunk

HEADER = 16
"""Words before the rows, so that these begin where kernels read them at once."""
FIELDS = 4
IN_FLIGHT = 2
"""Pinned buffers: a step is filled while the copy of the step before may still run."""


class StepInputs:
    """Rows of one new token each. `table` has `width` [1] blocks a row, as many as the longest sequence of the step
    needs, so that a copy takes what a step needs and no more. A negative token id stands for a token that only the
    device knows, see `known_tokens`."""

    def __init__(self, tables: Rows, tokens_per_block: int, device: torch.device) -> None:
        """`tables` are the rows of the BlockTables."""
        self._tables = tables
        self._tokens_per_block = tokens_per_block
        # A multiple, for the same reason as HEADER.
        self._most = -(-len(tables) // HEADER) * HEADER
        words = HEADER + self._most * (FIELDS + tables.shape[1])
        self._buffer = torch.zeros(words, dtype=torch.int64, device=device)
        self._stages = [_Stage(words, device) for _ in range(IN_FLIGHT)]
        self._next = 0
        self.width = self._buffer[:1]
        fields = self._buffer[HEADER : HEADER + FIELDS * self._most].view(FIELDS, self._most)
        self.token_ids, self.positions, self.places = fields[0], fields[1], fields[2]
        self.temperatures = fields[3].view(torch.float64)
        self.lowest = torch.full((self._most,), -math.inf, dtype=torch.float64, device=device)
        self.table = self._buffer[HEADER + FIELDS * self._most :]

    def fill(self, chunks: SequenceOf[Chunk], rows: int) -> None:
        """Takes the last tokens of sequences; further ones of the `rows` have the null block and store nothing."""
        self._fill(chunks, rows, [chunk.sequence.tokens[chunk.start] for chunk in chunks])

    def fill_chosen(self, chunks: SequenceOf[Chunk], rows: int, sources: SequenceOf[int]) -> None:
        """Takes the tokens that the device has chosen in the rows `sources`, and the host does not know."""
        self._fill(chunks, rows, [-1 - source for source in sources], unknown=1)

    def _fill(
        self, chunks: SequenceOf[Chunk], rows: int, first_field: SequenceOf[int], unknown: int = 0
    ) -> None:
        stage = self._stages[self._next]
        self._next = (self._next + 1) % IN_FLIGHT
        stage.wait()
        count, most = len(chunks), self._most
        starts = [chunk.start for chunk in chunks]
        width = max(starts) // self._tokens_per_block + 1
        words = stage.words
        words[0] = width
        fields = words[HEADER : HEADER + FIELDS * most].reshape(FIELDS, most)
        fields[:, :rows] = 0
        fields[0, :count] = first_field
        fields[1, :count] = starts
        drawing = [row for row, chunk in enumerate(chunks) if not chunk.sequence.token_rules.greedy]
        if drawing:
            sequences = [chunks[row].sequence for row in drawing]
            fields[2, drawing] = places_of(sequences, unknown)
            fields[3].view(np.float64)[drawing] = [
                temperature_of(each.token_rules.sampling) for each in sequences
            ]
        first = HEADER + FIELDS * most
        table = words[first : first + rows * width].reshape(rows, width)
        table[:count] = self._tables[[chunk.sequence.slot for chunk in chunks], :width]
        table[count:] = NULL_BLOCK
        stage.send(self._buffer, first + rows * width)


class _Stage:
    """Pinned memory, and the end of the last copy from there."""

    def __init__(self, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._memory = torch.zeros(words, dtype=torch.int64, pin_memory=pinned)
        untyped: Any = torch.cuda
        self._copied = untyped.Event() if pinned else None
        self.words = self._memory.numpy()

    def wait(self) -> None:
        if self._copied:
            self._copied.synchronize()

    def send(self, buffer: torch.Tensor, words: int) -> None:
        buffer[:words].copy_(self._memory[:words], non_blocking=True)
        if self._copied:
            self._copied.record()
