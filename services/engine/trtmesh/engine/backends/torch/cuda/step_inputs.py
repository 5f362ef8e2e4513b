"""The inputs of a captured decode step."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from trtmesh.engine.backends.torch.cuda.choice import draws_of
from trtmesh.engine.backends.torch.cuda.staging import ALIGNED, StagedWords, aligned
from trtmesh.engine.backends.torch.memory.kvcache import Rows
from trtmesh.engine.backends.torch.sequence import Chunk
from trtmesh.engine.scheduling.blocks import NULL_BLOCK

HEADER = ALIGNED
FIELDS = 4


class StepInputs:
    """Rows of one new token each. `table` has `width` [1] blocks a row, as many as the longest sequence of the step
    needs, so that a copy takes what a step needs and no more. A negative token id stands for a token that only the
    device knows, see `known_tokens`."""

    def __init__(self, tables: Rows, tokens_per_block: int, device: torch.device) -> None:
        """`tables` are the rows of the BlockTables."""
        self._tables = tables
        self._tokens_per_block = tokens_per_block
        self._most = aligned(len(tables))
        self._staged = StagedWords(HEADER + self._most * (FIELDS + tables.shape[1]), device)
        buffer = self._staged.buffer
        self.width = buffer[:1]
        fields = buffer[HEADER : HEADER + FIELDS * self._most].view(FIELDS, self._most)
        self.token_ids, self.positions, self.places = fields[0], fields[1], fields[2]
        self.temperatures = fields[3].view(torch.float64)
        self.lowest = torch.full((self._most,), -math.inf, dtype=torch.float64, device=device)
        self.table = buffer[HEADER + FIELDS * self._most :]

    def fill(self, chunks: SequenceOf[Chunk], rows: int) -> None:
        """Takes the last tokens of sequences; further ones of the `rows` have the null block and store nothing."""
        self._fill(chunks, rows, [chunk.sequence.tokens[chunk.start] for chunk in chunks])

    def fill_chosen(self, chunks: SequenceOf[Chunk], rows: int, sources: SequenceOf[int]) -> None:
        """Takes the tokens that the device has chosen in the rows `sources`, and the host does not know."""
        self._fill(chunks, rows, [-1 - source for source in sources], unknown=1)

    def _fill(
        self, chunks: SequenceOf[Chunk], rows: int, first_field: SequenceOf[int], unknown: int = 0
    ) -> None:
        count, most = len(chunks), self._most
        starts = [chunk.start for chunk in chunks]
        width = max(starts) // self._tokens_per_block + 1
        words = self._staged.begin()
        words[0] = width
        fields = words[HEADER : HEADER + FIELDS * most].reshape(FIELDS, most)
        fields[:, :rows] = 0
        fields[0, :count] = first_field
        fields[1, :count] = starts
        places, temperatures = draws_of([chunk.sequence for chunk in chunks], unknown)
        fields[2, :count] = places
        fields[3].view(np.float64)[:count] = temperatures
        first = HEADER + FIELDS * most
        table = words[first : first + rows * width].reshape(rows, width)
        table[:count] = self._tables[[chunk.sequence.slot for chunk in chunks], :width]
        table[count:] = NULL_BLOCK
        self._staged.send(first + rows * width)
