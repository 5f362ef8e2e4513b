"""Parts in messages, however the sender cuts them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from trtmesh.engine.handoff.block_plan import Run
from trtmesh.engine.handoff.copying import Copying, InPasses, InThreads
from trtmesh.engine.handoff.transports.streamed import Damaged, StreamedPart
from trtmesh.engine.handoff.transports.transport import ReadFailed, ShardCopy
from trtmesh.engine.kv_memory import Bytes, HostKvMemory, Shard, host_memory

ROWS, BLOCKS = 13, 40
SPANS = ((16, 80), (0, 0), (0, 32))
"""Of the sender's three shards; the second has none of the layers."""


@pytest.fixture(params=["in passes", "in threads"])
def copying(request: pytest.FixtureRequest) -> Iterator[Copying]:
    with ThreadPoolExecutor(1) as threads:
        yield InPasses() if request.param == "in passes" else InThreads(threads)


def pool() -> HostKvMemory:
    shard = Shard(range(1), range(1), 16, 4, 0, 2)
    return HostKvMemory([shard, shard], [host_memory(BLOCKS, shard.block_bytes) for _ in range(2)])


def rows_of(memory: HostKvMemory, shard: int) -> Bytes:
    return memory.memory(shard).rows


def copies(dice: random.Random) -> list[ShardCopy]:
    """Some rows of the first shard in halves, and all rows of the third."""
    some = sorted(dice.sample(range(ROWS), 7))
    halves = (Run(16, 32, 32), Run(48, 0, 32))
    return [
        ShardCopy(0, 0, some, dice.sample(range(BLOCKS), 7), halves),
        ShardCopy(2, 1, range(ROWS), dice.sample(range(BLOCKS), ROWS), (Run(0, 100, 32),)),
    ]


def cut(dice: random.Random, data: bytes, most: int) -> Iterator[memoryview]:
    at = 0
    while at < len(data):
        size = dice.randint(1, most)
        yield memoryview(data)[at : at + size]
        at += size


@pytest.mark.parametrize("most", [1, 7, 64, 300, 5000])
@pytest.mark.parametrize("seed", range(3))
async def test_rows_reach_their_blocks(seed: int, most: int, copying: Copying) -> None:
    dice, memory = random.Random(seed), pool()
    data = dice.randbytes(ROWS * (64 + 32))
    first = np.frombuffer(data[: ROWS * 64], dtype=np.uint8).reshape(ROWS, 64)
    third = np.frombuffer(data[ROWS * 64 :], dtype=np.uint8).reshape(ROWS, 32)
    part = StreamedPart(memory, copying, SPANS, ROWS, zlib.crc32(data))
    for chunk in cut(dice, data, most):
        part.feed(chunk)
    one, other = copies(dice)
    await part.read([one, other])
    expected = np.zeros((2, BLOCKS, 256), dtype=np.uint8)
    expected[0, one.target_blocks, 32:64] = first[one.source_blocks, :32]
    expected[0, one.target_blocks, :32] = first[one.source_blocks, 32:]
    expected[1, other.target_blocks, 100:132] = third
    for shard in range(2):
        assert (rows_of(memory, shard) == expected[shard]).all()


async def test_nothing_of_a_damaged_part_reaches_a_block(copying: Copying) -> None:
    dice, memory = random.Random(1), pool()
    data = dice.randbytes(ROWS * 96)
    part = StreamedPart(memory, copying, SPANS, ROWS, zlib.crc32(data) ^ 1)
    for chunk in cut(dice, data, 300):
        part.feed(chunk)
    with pytest.raises(Damaged):
        await part.read(copies(dice))
    assert not rows_of(memory, 0).any()
    assert not rows_of(memory, 1).any()


async def test_abandoned_part_fails_its_read(copying: Copying) -> None:
    part = StreamedPart(pool(), copying, SPANS, ROWS, 0)
    part.feed(memoryview(bytes(5)))
    part.abandon()
    with pytest.raises(ReadFailed, match="within a part"):
        await part.read([])
