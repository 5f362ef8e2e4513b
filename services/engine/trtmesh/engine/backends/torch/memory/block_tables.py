"""The blocks of every sequence in the batch, as one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from trtmesh.engine.scheduling.blocks import NULL_BLOCK


class BlockTables:
    """Implements Tables by an array for all sequences in the batch: a step gathers rows instead of walking lists.

    `rows` is [max_batch_size, blocks of the longest sequence], padded with NULL_BLOCK.

    `versions` [max_batch_size] changes when a row goes to another sequence or takes over the KV of another.
    """

    def __init__(self, max_batch_size: int, blocks_per_sequence: int) -> None:
        shape = (max_batch_size, blocks_per_sequence)
        self.rows: NDArray[np.int64] = np.full(shape, NULL_BLOCK, dtype=np.int64)
        self.versions: NDArray[np.int64] = np.zeros(max_batch_size, dtype=np.int64)
        self._free = list(range(max_batch_size))[::-1]

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Returns a free row; check `free_slots` first."""
        slot = self._free.pop()
        self.versions[slot] += 1
        return slot

    def put(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Writes `blocks` from place `first` on."""
        self.rows[slot, first : first + len(blocks)] = blocks

    def replace(self, slot: int, blocks: Sequence[int]) -> None:
        """Replaces the whole row."""
        self.rows[slot] = NULL_BLOCK
        self.versions[slot] += 1
        self.put(slot, 0, blocks)

    def give_back(self, slot: int) -> None:
        self.rows[slot] = NULL_BLOCK
        self._free.append(slot)
