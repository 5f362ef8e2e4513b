from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest
from trtmesh.engine.kv_memory import HostKvMemory, Shard, host_memory

SHARD = Shard(range(2), range(2), 4, 8, 1, 2)


def test_host_memory_is_the_content_of_its_file() -> None:
    memory = host_memory(3, 4096)
    assert memory.rows.shape == (3, 4096)
    assert not memory.rows.any()
    memory.rows[2] = 7
    assert memory.file is not None
    with mmap.mmap(memory.file, 3 * 4096, prot=mmap.PROT_READ) as other:
        assert other[2 * 4096 :] == b"\x07" * 4096


def test_file_lives_as_long_as_its_rows() -> None:
    memory = host_memory(1, 4096)
    file, rows = memory.file, memory.rows[:, :8]
    assert file is not None
    del memory
    gc.collect()
    os.fstat(file)
    del rows
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_spans_of_blocks_are_read_and_written() -> None:
    memory = HostKvMemory([SHARD], [host_memory(4, SHARD.block_bytes)])
    data = np.arange(2 * 16, dtype=np.uint8).reshape(2, 16)
    memory.write(0, [3, 1], (8, 24), data)
    found = np.zeros_like(data)
    memory.read(0, [1, 3], (8, 24), found)
    assert (found == data[::-1]).all()
    assert memory.memory(0).rows.sum() == data.sum()


def test_pieces_of_host_memory_are_not_copied() -> None:
    memory = HostKvMemory([SHARD], [host_memory(4, SHARD.block_bytes)])

    def take(size: int) -> memoryview:
        raise AssertionError(size)

    one, other = memory.pieces(0, [3, 1], (8, 24), take)
    data = np.arange(2 * 16, dtype=np.uint8).reshape(2, 16)
    memory.write(0, [3, 1], (8, 24), data)
    assert (bytes(one), bytes(other)) == (data[0].tobytes(), data[1].tobytes())
