"""Parts in chunks: all bytes, in order, none larger than a message."""

from __future__ import annotations

import numpy as np
import pytest
from trtmesh.engine.handoff.parts import Part, chunks_of, sizes_of, span_of
from trtmesh.engine.kv_memory import HostKvMemory, Shard, host_memory

SHARDS = [Shard(range(2), range(2), 8, 4, 0, 2), Shard(range(2, 4), range(2), 8, 4, 0, 2)]
"""The layers of a model in two pools, 512 bytes a block in each."""

BLOCKS = [5, 2, 7, 1]


@pytest.fixture
def memory() -> HostKvMemory:
    dice = np.random.default_rng(0)
    memory = HostKvMemory(SHARDS, [host_memory(9, shard.block_bytes) for shard in SHARDS])
    for shard in range(2):
        memory.memory(shard).rows[:] = dice.integers(0, 256, (9, 512), dtype=np.uint8)
    return memory


@pytest.mark.parametrize("max_bytes", [100, 512, 1100, 2**20])
@pytest.mark.parametrize("layers", [(0, 4), (1, 2), (1, 1), (3, 1)])
def test_chunks_have_all_bytes_in_order(
    memory: HostKvMemory, layers: tuple[int, int], max_bytes: int
) -> None:
    part = Part(0, len(BLOCKS), *layers)
    found = list(chunks_of(memory, part, BLOCKS, max_bytes, lambda size: memoryview(bytes(size))))
    expected = b""
    for number, shard in enumerate(SHARDS):
        first, last = span_of(shard, part.layer_range)
        for block in BLOCKS:
            expected += memory.memory(number).rows[block, first:last].tobytes()
    assert b"".join(piece for chunk in found for piece in chunk) == expected
    assert len(expected) == sum(sizes_of(part, SHARDS, len(BLOCKS)))
    assert all(0 < sum(map(len, chunk)) <= max_bytes for chunk in found)
