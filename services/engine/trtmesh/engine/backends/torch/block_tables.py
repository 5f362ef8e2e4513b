"""Which blocks the sequences of the batch hold, as one array, so that a step gathers rows instead of walking lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from trtmesh.engine.backends.torch.blocks import NULL_BLOCK


class BlockTables:
    """`rows` is [max_batch_size, blocks of the longest sequence]; places without a block hold NULL_BLOCK."""

    def __init__(self, max_batch_size: int, blocks_per_sequence: int) -> None:
        shape = (max_batch_size, blocks_per_sequence)
        self.rows: NDArray[np.int64] = np.full(shape, NULL_BLOCK, dtype=np.int64)
        self._free = list(range(max_batch_size))[::-1]

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A row that nobody has; ask `free_slots` first."""
        return self._free.pop()

    def put(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Writes `blocks` from place `first` on."""
        self.rows[slot, first : first + len(blocks)] = blocks

    def replace(self, slot: int, blocks: Sequence[int]) -> None:
        """Makes `blocks` all that the row holds."""
        self.rows[slot] = NULL_BLOCK
        self.put(slot, 0, blocks)

    def give_back(self, slot: int) -> None:
        self.rows[slot] = NULL_BLOCK
        self._free.append(slot)
