"""The KV pool as one tensor, the blocks of every sequence in the batch, and the row numbers of both for attention.

Layout [blocks, layers, 2, kv_heads, tokens_per_block, head_dim], with 2 for key and value, so that a block, or a range
of its heads, is contiguous. In a view of rows of [tokens_per_block * head_dim], the keys of (block, layer, head) are
row ((block * layers + layer) * 2 + 0) * kv_heads + head, and the values kv_heads rows further. Rows of different layers
differ by a constant, so the same index serves all layers, each with a view shifted by the layer's constant.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.engine.kv_memory import Bytes, map_anonymous
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, Move


class AnonymousFile:
    """Zeroed memory of a fixed size, with `file` as long as this object lives."""

    def __init__(self, size: int) -> None:
        """Where the system has no anonymous files, the memory is private. The file is sealed before an offer."""
        memory, self.file = map_anonymous(size)
        if self.file is not None:
            weakref.finalize(self, os.close, self.file)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)


class CopiesBlocks(Protocol):
    """A device's way to copy blocks in device memory, and between device and pinned host memory."""

    def __call__(
        self, source: Tensor, target: Tensor, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copies block `sources[i]` of `source` to block `targets[i]` of `target`, for every i, on the current stream.

        Both are [blocks, ...] of the same type, each block contiguous. No target occurs twice, or is a source too.
        """


def copy_blocks(
    source: Tensor, target: Tensor, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Implements CopiesBlocks for every device: between two devices, the content is gathered and waited for."""
    content = source.index_select(0, indexes(sources, source.device))
    target.index_copy_(0, indexes(targets, target.device), content.to(target.device))


def indexes(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers on a device; no need to wait."""
    pinned = device.type == "cuda"
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned)
    return host.to(device, non_blocking=True)


Rows = NDArray[np.int64]


class BlockTables:
    """Implements Tables by an array for all sequences in the batch: a step gathers rows instead of walking lists.

    `rows` is [max_batch_size, blocks of the longest sequence], padded with NULL_BLOCK.

    `versions` [max_batch_size] changes when a row goes to another sequence or takes over the KV of another.
    """

    def __init__(self, max_batch_size: int, blocks_per_sequence: int) -> None:
        shape = (max_batch_size, blocks_per_sequence)
        self.rows: Rows = np.full(shape, NULL_BLOCK, dtype=np.int64)
        self.versions: Rows = np.zeros(max_batch_size, dtype=np.int64)
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


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of a token. Where the sizes of keys and values differ, `head_dim` is the larger."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class KvCache:
    """The device blocks in `pool`, with the null block as block 0; the host blocks, numbered after them, in `host`."""

    def __init__(
        self,
        shape: KvShape,
        *,
        blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
        host_blocks: int = 0,
        pins_memory: bool = False,
        shares_memory: bool = False,
        copies_blocks: CopiesBlocks = copy_blocks,
    ) -> None:
        """With `shares_memory`, the pool is in an anonymous file where the system has such files."""
        self.shape = shape
        self.tokens_per_block = tokens_per_block
        self.copy_blocks = copies_blocks
        heads = shape.kv_heads
        block = (shape.layers, 2, heads, tokens_per_block, shape.head_dim)
        self._shared: AnonymousFile | None = None
        if shares_memory:
            size = (blocks + 1) * tokens_per_block * shape.bytes_per_token(dtype)
            self._shared = AnonymousFile(size)
            self.pool = torch.from_numpy(self._shared.bytes).view(dtype).view(-1, *block)
        else:
            self.pool = torch.zeros((blocks + 1, *block), dtype=dtype, device=device)
        self.host = torch.zeros((host_blocks, *block), dtype=dtype, pin_memory=pins_memory)
        self.pinned_bytes = self.host.nbytes if pins_memory else 0
        self._rows_per_block = shape.layers * 2 * heads
        block_rows = self.pool.view(-1, tokens_per_block * shape.head_dim)
        token_rows = self.pool.view(-1, shape.head_dim)
        firsts = [layer * 2 * heads for layer in range(shape.layers)]
        # For each layer [rows, tokens_per_block * head_dim] and [rows, head_dim].
        self.block_rows = [block_rows[first:] for first in firsts]
        self._token_rows = [token_rows[first * tokens_per_block :] for first in firsts]
        # The keys and values of a block in a layer.
        self._head_rows: Rows = np.arange(2 * heads, dtype=np.int64)

    @property
    def file(self) -> int | None:
        """The anonymous file with the pool; None if the pool is private."""
        return self._shared.file if self._shared else None

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Carries out the moves of the block pool, with the same effect as in sequence.

        New blocks are cleared: masked values are still multiplied, by zero, and must be finite.
        """
        for batch in _batches(moves, self.pool.shape[0]):
            target, targets = self._place([move.target for move in batch])
            if batch[0].source == NULL_BLOCK:
                target.index_fill_(0, indexes(targets, target.device), 0)
            else:
                source, sources = self._place([move.source for move in batch])
                self.copy_blocks(source, target, sources, targets)

    def _place(self, blocks: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The tensor of some blocks of a kind, and their numbers there."""
        first_of_host = self.pool.shape[0]
        if blocks[0] < first_of_host:
            return self.pool, blocks
        return self.host, [block - first_of_host for block in blocks]

    def rows_of_blocks(self, blocks: Rows) -> Rows:
        """Block rows in layer 0 of `blocks` [sequences, blocks]: [2, sequences, kv_heads, blocks]."""
        heads = self._head_rows.reshape(2, 1, -1, 1)
        return blocks[None, :, None, :] * self._rows_per_block + heads

    def rows_of_tokens(self, blocks: Rows, positions: Rows) -> Rows:
        """Token rows in layer 0 of tokens at `positions` in `blocks`, [tokens] each: [tokens, 2 * kv_heads]."""
        size = self.tokens_per_block
        rows = blocks[:, None] * self._rows_per_block + self._head_rows[None, :]
        return rows * size + (positions % size)[:, None]

    def write(self, layer: int, token_rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Stores keys and values [tokens, 2 * kv_heads, head_dim] at `token_rows` [tokens * 2 * kv_heads]."""
        rows = kv.reshape(-1, self.shape.head_dim)
        self._token_rows[layer].index_copy_(0, token_rows, rows.to(self.pool.dtype))


def _batches(moves: Sequence[Move], first_of_host: int) -> Iterator[list[Move]]:
    """Runs of moves of the same kind, in any order: no target occurs twice, or as a source."""
    batch: list[Move] = []
    read: set[int] = set()
    written: set[int] = set()
    kind = None
    for move in moves:
        own = (move.source == NULL_BLOCK, move.source < first_of_host, move.target < first_of_host)
        depends = move.source in written or move.target in written or move.target in read
        if batch and (own != kind or depends):
            yield batch
            batch, read, written = [], set(), set()
        kind = own
        batch.append(move)
        read.add(move.source)
        written.add(move.target)
    if batch:
        yield batch
