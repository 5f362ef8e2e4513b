"""The pool in an anonymous file."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch
from trtmesh.engine.backends.torch.memory.kvcache import AnonymousFile, KvCache, KvShape
from trtmesh.engine.handoff.transports.pool_files import seal
from trtmesh.engine.scheduling.blocks import Move


def cache(*, shares_memory: bool) -> KvCache:
    return KvCache(
        KvShape(layers=3, kv_heads=2, head_dim=4),
        blocks=5,
        tokens_per_block=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        shares_memory=shares_memory,
    )


def test_pool_is_seen_through_its_file() -> None:
    shared = cache(shares_memory=True)
    assert shared.file is not None
    shared.pool[3] = 1.5
    with mmap.mmap(shared.file, 0, prot=mmap.PROT_READ) as mapped:
        rows = np.frombuffer(mapped, dtype=np.uint8).reshape(6, -1)
        assert (rows == shared.pool.view(6, -1).view(torch.uint8).numpy()).all()
        del rows
    shared.carry_out([Move(3, 2), Move(0, 3)])
    assert bool((shared.pool[2] == 1.5).all())
    assert not shared.pool[[0, 1, 3, 4, 5]].any()


def test_pool_can_be_offered_to_readers() -> None:
    pool = AnonymousFile(8192)
    assert pool.file is not None
    seal(pool.file)
    pool.bytes[5] = 7
    with mmap.mmap(pool.file, 8192, prot=mmap.PROT_READ) as reader:
        assert reader[5] == 7
    with pytest.raises(PermissionError):
        mmap.mmap(pool.file, 8192)


@pytest.mark.parametrize("size", [100, 10_000])
def test_offered_file_has_a_fixed_size(size: int) -> None:
    memory = AnonymousFile(5000)
    assert memory.file is not None
    seal(memory.file)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file, size)
    assert len(memory.bytes) == 5000
    assert not memory.bytes.any()


def test_file_is_closed_with_its_owner() -> None:
    memory = AnonymousFile(5000)
    file, kept = memory.file, memory.bytes
    assert file is not None
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    kept[:] = 7


def test_pool_is_private_where_the_system_has_no_anonymous_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    shared = cache(shares_memory=True)
    assert shared.file is None
    shared.pool[1] = 2
    assert bool((shared.pool[1] == 2).all())
