"""The KV pool for handoffs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from trtmesh.engine.backends.torch.memory.kvcache import CopiesBlocks, KvCache
from trtmesh.engine.backends.torch.memory.tensors import DATA_TYPES
from trtmesh.engine.kv_memory import (
    Bytes,
    DeviceMemory,
    HostKvMemory,
    HostMemory,
    KvMemory,
    Shard,
    Span,
    TakeMemory,
)


def kv_memory_of(cache: KvCache) -> KvMemory:
    """The pool of a cache, as a single shard."""
    shard = _shard(cache)
    if cache.pool.device.type != "cpu":
        return DeviceKvMemory(shard, cache.pool, cache.copy_blocks)
    return HostKvMemory([shard], [HostMemory(_rows(cache.pool).numpy(), cache.file)])


class DeviceKvMemory:
    """KvMemory over a tensor of a device; copies go through pinned host memory, on a separate stream. This stream waits
    for no other: a worker announces blocks once surely written by the device, and reserves blocks after the end of all
    earlier writes (`Engine.collect` and `reserve`).
    """

    def __init__(self, shard: Shard, pool: torch.Tensor, copies_blocks: CopiesBlocks) -> None:
        self.shards = (shard,)
        self._rows = _rows(pool)
        self._copy = copies_blocks
        # Untyped.
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(pool.device) if pool.is_cuda else None

    def memory(self, _shard: int) -> DeviceMemory:
        rows = self._rows
        return DeviceMemory(rows.data_ptr(), rows.nbytes, rows.device.index or 0)

    def read(self, _shard: int, blocks: Sequence[int], span: Span, into: Bytes) -> None:
        into[...] = self._read(blocks, span).numpy()

    def pieces(
        self, _shard: int, blocks: Sequence[int], span: Span, _take: TakeMemory
    ) -> list[memoryview]:
        # Lent again by PyTorch, once nothing refers to the memory.
        return [self._read(blocks, span).view(-1).numpy().data]

    def write(self, _shard: int, blocks: Sequence[int], span: Span, data: Bytes) -> None:
        staged = self._host_memory(blocks, span)
        staged.numpy()[...] = data
        with torch.cuda.stream(self._stream):
            self._copy(staged, self._span(span), range(len(blocks)), blocks)
        self._wait()

    def _read(self, blocks: Sequence[int], span: Span) -> torch.Tensor:
        """A span of each block in host memory, [blocks, bytes of the span]."""
        staged = self._host_memory(blocks, span)
        with torch.cuda.stream(self._stream):
            self._copy(self._span(span), staged, blocks, range(len(blocks)))
        self._wait()
        return staged

    def _host_memory(self, blocks: Sequence[int], span: Span) -> torch.Tensor:
        shape = len(blocks), span[1] - span[0]
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _wait(self) -> None:
        if self._stream:
            self._stream.synchronize()

    def _span(self, span: Span) -> torch.Tensor:
        return self._rows[:, span[0] : span[1]]


def _shard(cache: KvCache) -> Shard:
    shape, dtype = cache.shape, cache.pool.dtype
    return Shard(
        layers=range(shape.layers),
        kv_heads=range(shape.kv_heads),
        tokens_per_block=cache.tokens_per_block,
        head_dim=shape.head_dim,
        data_type=DATA_TYPES[dtype],
        element_bytes=dtype.itemsize,
    )


def _rows(pool: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes of a block]"""
    return pool.view(len(pool), -1).view(torch.uint8)
