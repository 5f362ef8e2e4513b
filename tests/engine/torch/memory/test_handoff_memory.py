"""The pool as transports read and write it, in host memory and as a tensor of a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trtmesh.engine.backends.torch.memory.handoff_memory import DeviceKvMemory, kv_memory_of
from trtmesh.engine.backends.torch.memory.kvcache import KvCache, KvShape, copy_blocks
from trtmesh.engine.kv_memory import HostMemory
from trtmesh.v1 import generation_pb2 as pb

TYPES = {
    torch.float32: pb.DATA_TYPE_FP32,
    torch.float16: pb.DATA_TYPE_FP16,
    torch.bfloat16: pb.DATA_TYPE_BF16,
}


def cache(dtype: torch.dtype = torch.float32) -> KvCache:
    made = KvCache(
        KvShape(layers=3, kv_heads=2, head_dim=4),
        blocks=5,
        tokens_per_block=8,
        dtype=dtype,
        device=torch.device("cpu"),
        shares_memory=True,
    )
    made.pool.copy_(torch.arange(made.pool.numel()).view(made.pool.shape))
    return made


@pytest.mark.parametrize("dtype", TYPES)
def test_shard_says_where_each_token_is(dtype: torch.dtype) -> None:
    pool = cache(dtype)
    memory = kv_memory_of(pool)
    (shard,) = memory.shards
    assert shard.data_type == TYPES[dtype]
    host = memory.memory(0)
    assert isinstance(host, HostMemory)
    assert host.file == pool.file
    assert host.rows.shape == (6, shard.block_bytes)
    for block, layer, value, head, token in ((0, 0, 0, 0, 0), (4, 2, 1, 1, 7), (3, 1, 0, 1, 2)):
        first = shard.offset(layer, value, head, token)
        found = host.rows[block, first : first + shard.token_bytes].tobytes()
        own = pool.pool[block, layer, value, head, token].view(torch.uint8).numpy().tobytes()
        assert found == own


def no_memory(size: int) -> memoryview:
    raise AssertionError(size)


def test_a_device_reads_and_writes_as_host_memory_does() -> None:
    one, other = cache(), cache()
    host = kv_memory_of(one)
    device = DeviceKvMemory(host.shards[0], other.pool, copy_blocks)
    span = (host.shards[0].offset(1, 0, 0, 0), host.shards[0].offset(2, 0, 0, 0))
    data = np.random.default_rng(0).integers(0, 120, (2, span[1] - span[0]), dtype=np.uint8)
    of_host, of_device = np.zeros_like(data), np.zeros_like(data)
    host.read(0, [4, 1], span, of_host)
    device.read(0, [4, 1], span, of_device)
    assert of_host.any()
    assert (of_device == of_host).all()
    for memory in (host, device):
        memory.write(0, [2, 5], span, data)
    device.read(0, [2, 5], span, of_device)
    assert (of_device == data).all()
    (copy,) = device.pieces(0, [2, 5], span, no_memory)
    assert len(copy) == data.size
    assert bytes(copy) == b"".join(host.pieces(0, [2, 5], span, no_memory)) == data.tobytes()
    assert torch.equal(one.pool, other.pool)
    assert device.memory(0).address == other.pool.data_ptr()
    assert device.memory(0).size == other.pool.nbytes
