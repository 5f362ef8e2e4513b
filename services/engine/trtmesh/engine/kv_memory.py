"""KV in a backend's memory, as a handoff sees it: pools of blocks, and their content."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Span = tuple[int, int]
"""First byte in a block, and the byte after the last."""

TakeMemory = Callable[[int], memoryview]
"""Gives memory of so many bytes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The blocks of a pool, and the pool's layers and heads."""

    layers: range
    kv_heads: range
    tokens_per_block: int
    head_dim: int
    data_type: int
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key or value in a head."""
        return self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        rows = 2 * len(self.layers) * len(self.kv_heads)
        return rows * self.tokens_per_block * self.token_bytes

    def offset(self, layer: int, value: int, head: int, token: int) -> int:
        """Offset of a token in the block; `value` is 0 for the key and 1 for the value."""
        row = (self.layers.index(layer) * 2 + value) * len(self.kv_heads)
        row += self.kv_heads.index(head)
        return (row * self.tokens_per_block + token) * self.token_bytes


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of a shard's blocks."""

    rows: Bytes
    """[blocks, block_bytes], writable; row b is block b. Block 0 is the null block."""
    file: int | None = None
    """Anonymous file with the rows from offset 0, for other processes of the host to map; None if private. The file
    allows seals: after an offer, no new mapping can be writable."""


def map_anonymous(size: int) -> tuple[mmap.mmap, int | None]:
    """Maps zeroed memory: a new anonymous file, to be closed by the caller and sealed before an offer, or private
    memory and None where the system has no such files."""
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, size), None
    file = os.memfd_create("trtmesh-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        return mmap.mmap(file, size), file
    except BaseException:
        os.close(file)
        raise


def host_memory(blocks: int, block_bytes: int) -> HostMemory:
    """Allocates zeroed blocks, in an anonymous file where the system has such files."""
    mapping, file = map_anonymous(blocks * block_bytes)
    if file is not None:
        weakref.finalize(mapping, os.close, file)
    return HostMemory(np.frombuffer(mapping, dtype=np.uint8).reshape(blocks, block_bytes), file)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Device memory of a shard's blocks."""

    address: int
    size: int
    device: int


class KvMemory(Protocol):
    """The KV pools of a backend. All methods may be called from any thread, while the backend computes.

    A block has the same number in all shards. Callers use only blocks of leases; no step writes to these.
    """

    @property
    def shards(self) -> Sequence[Shard]:
        """The shape of each pool."""

    def memory(self, shard: int) -> HostMemory | DeviceMemory:
        """Where the blocks of a shard are."""

    def read(self, shard: int, blocks: Sequence[int], span: Span, into: Bytes) -> None:
        """Copies a span of each block to `into` [blocks, bytes of the span], contiguous."""

    def pieces(
        self, shard: int, blocks: Sequence[int], span: Span, take: TakeMemory
    ) -> list[memoryview]:
        """A span of each block to be sent, in order: views of host memory, or a copy, in memory from `take` or of the
        backend's own."""

    def write(self, shard: int, blocks: Sequence[int], span: Span, data: Bytes) -> None:
        """Writes `data` [blocks, bytes of the span] into the span of each block."""


class HostKvMemory:
    """KvMemory over host memory."""

    def __init__(self, shards: Sequence[Shard], memories: Sequence[HostMemory]) -> None:
        self.shards = tuple(shards)
        self._memories = tuple(memories)

    def memory(self, shard: int) -> HostMemory:
        return self._memories[shard]

    def read(self, shard: int, blocks: Sequence[int], span: Span, into: Bytes) -> None:
        rows, (first, last) = self._memories[shard].rows, span
        # Indexing with all blocks at once would copy them to new memory first.
        for row, block in enumerate(blocks):
            into[row] = rows[block, first:last]

    def pieces(
        self, shard: int, blocks: Sequence[int], span: Span, _take: TakeMemory
    ) -> list[memoryview]:
        rows, (first, last) = self._memories[shard].rows, span
        return [rows[block, first:last].data for block in blocks]

    def write(self, shard: int, blocks: Sequence[int], span: Span, data: Bytes) -> None:
        rows = self._memories[shard].rows
        rows[np.asarray(blocks, dtype=np.intp), span[0] : span[1]] = data
