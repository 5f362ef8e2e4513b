"""The KV pool as handoffs see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from trtmesh.engine.backends.torch.memory.kvcache import KvCache
from trtmesh.engine.backends.torch.memory.tensors import DATA_TYPES
from trtmesh.engine.kv_memory import (
    Bytes,
    DeviceMemory,
    HostKvMemory,
    HostMemory,
    KvMemory,
    Shard,
    Span,
)


def kv_memory_of(cache: KvCache) -> KvMemory:
    """The pool of a cache, as one shard."""
    shard = _shard(cache)
    if cache.pool.device.type != "cpu":
        return DeviceKvMemory(shard, cache.pool)
    return HostKvMemory([shard], [HostMemory(_rows(cache.pool).numpy(), cache.file)])


class DeviceKvMemory:
    """KvMemory over a tensor of a device; copies run on a stream of their own."""

    def __init__(self, shard: Shard, pool: torch.Tensor) -> None:
        self.shards = (shard,)
        self._rows = _rows(pool)
        # Untyped.
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(pool.device) if pool.is_cuda else None

    def memory(self, _shard: int) -> DeviceMemory:
        rows = self._rows
        return DeviceMemory(rows.data_ptr(), rows.nbytes, rows.device.index or 0)

    def read(self, _shard: int, blocks: Sequence[int], span: Span) -> Bytes:
        with torch.cuda.stream(self._stream):
            # Waits for the copy.
            return self._span(span).index_select(0, self._indexes(blocks)).cpu().numpy()

    def write(self, _shard: int, blocks: Sequence[int], span: Span, data: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            content = torch.from_numpy(data).to(self._rows.device)
            self._span(span).index_copy_(0, self._indexes(blocks), content)
        if self._stream:
            self._stream.synchronize()

    def _span(self, span: Span) -> torch.Tensor:
        return self._rows[:, span[0] : span[1]]

    def _indexes(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(blocks), dtype=torch.int64, device=self._rows.device)


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
