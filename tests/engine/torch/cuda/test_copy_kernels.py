"""Blocks copied by a kernel, in the memory of the device and between it and pinned host memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.block_copies import PART, copy_blocks
from trtmesh.engine.backends.torch.memory import kvcache
from trtmesh.engine.backends.torch.memory.handoff_memory import DeviceKvMemory, kv_memory_of
from trtmesh.engine.backends.torch.memory.kvcache import KvCache, KvShape
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, Move

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

BLOCKS, HOST_BLOCKS = 9, 5
SHAPE = KvShape(layers=3, kv_heads=2, head_dim=16)


def cache(device: torch.device, **options: object) -> KvCache:
    """Blocks of more words than a program copies, with different content."""
    made = KvCache(
        SHAPE,
        blocks=BLOCKS,
        host_blocks=HOST_BLOCKS,
        tokens_per_block=64,
        dtype=torch.bfloat16,
        device=device,
        pins_memory=device.type == "cuda",
        **options,  # type: ignore[arg-type]  # the way to copy, or none
    )
    assert made.pool[0].nbytes > PART * 8
    filled(made.pool, 1)
    filled(made.host, 2)
    return made


def filled(tensor: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randn(tensor.shape, generator=generator))


def content(made: KvCache) -> Tensor:
    if made.pool.is_cuda:
        torch.cuda.synchronize()
    return torch.cat((made.pool.cpu(), made.host))


def test_moves_are_those_of_the_plain_way(device: torch.device) -> None:
    draw = random.Random(0)
    by_kernel, plain = cache(device, copies_blocks=copy_blocks), cache(device)
    host = range(BLOCKS + 1, BLOCKS + 1 + HOST_BLOCKS)
    for _ in range(20):
        moves = []
        for _ in range(draw.randint(1, 12)):
            source, target = draw.randrange(host.stop), draw.randrange(1, host.stop)
            both_away = target in host and (source in host or source == NULL_BLOCK)
            if source != target and not both_away:
                moves.append(Move(source, target))
        by_kernel.carry_out(moves)
        plain.carry_out(moves)
        assert torch.equal(content(by_kernel), content(plain))


@pytest.mark.parametrize(
    ("first", "size"), [(0, 24_576), (4096, 4096), (8, 24), (4, 20), (2, 6), (1, 1), (3, 10_001)]
)
def test_spans_of_any_place_and_size(first: int, size: int, device: torch.device) -> None:
    pinned = device.type == "cuda"
    pool = torch.randint(0, 256, (6, 24_576), dtype=torch.uint8).to(device)
    staged = torch.zeros(3, size, dtype=torch.uint8, pin_memory=pinned)
    copy_blocks(pool[:, first : first + size], staged, [4, 1, 5], range(3))
    if pinned:
        torch.cuda.synchronize()
    assert torch.equal(staged, pool[[4, 1, 5], first : first + size].cpu())
    by_kernel, plain = pool.clone(), pool.clone()
    for target, copy in ((by_kernel, copy_blocks), (plain, kvcache.copy_blocks)):
        copy(staged, target[:, first : first + size], [0, 1, 2], [2, 5, 3])
    assert torch.equal(by_kernel, plain)
    assert not torch.equal(by_kernel, pool)


def test_no_blocks_are_no_copy(device: torch.device) -> None:
    pool = torch.zeros(2, 8, dtype=torch.uint8, device=device)
    copy_blocks(pool, pool, [], [])
    assert not pool.any()


def test_handoffs_read_and_write_as_those_of_host_memory(device: torch.device) -> None:
    own, other = cache(device), cache(torch.device("cpu"))
    host = kv_memory_of(other)
    memory = DeviceKvMemory(host.shards[0], own.pool, copy_blocks)
    (shard,) = host.shards
    dice = np.random.default_rng(0)
    for span in ((0, shard.block_bytes), (shard.offset(1, 0, 0, 0), shard.offset(2, 1, 0, 5))):
        found, expected = (np.zeros((3, span[1] - span[0]), dtype=np.uint8) for _ in range(2))
        memory.read(0, [4, 1, 9], span, found)
        host.read(0, [4, 1, 9], span, expected)
        assert (found == expected).all()
        (copy,) = memory.pieces(0, [4, 1, 9], span, lambda _: memoryview(b""))
        assert bytes(copy) == expected.tobytes()
        data = dice.integers(0, 256, found.shape, dtype=np.uint8)
        data.flags.writeable = False
        for each in (memory, host):
            each.write(0, [2, 7, 3], span, data)
        assert torch.equal(own.pool.cpu().view(torch.uint8), other.pool.view(torch.uint8))


def test_a_copy_stays_while_it_is_referred_to(device: torch.device) -> None:
    """Its memory is lent again only afterwards."""
    own = cache(device)
    (shard,) = kv_memory_of(cache(torch.device("cpu"))).shards
    memory = DeviceKvMemory(shard, own.pool, copy_blocks)
    span = (0, shard.block_bytes)

    def piece(block: int) -> memoryview:
        (copy,) = memory.pieces(0, [block], span, lambda _: memoryview(b""))
        return copy

    pieces = [piece(block) for block in range(BLOCKS)]
    rows = own.pool.cpu().view(BLOCKS + 1, -1).view(torch.uint8).numpy()
    assert [bytes(each) for each in pieces] == [rows[block].tobytes() for block in range(BLOCKS)]
