"""Copies in steps, on the event loop or beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import cast

import pytest
from trtmesh.engine.handoff import copying as copying_module
from trtmesh.engine.handoff.copying import Copying, InPasses, InThreads, copying_of
from trtmesh.engine.kv_memory import DeviceMemory, HostKvMemory, KvMemory, Shard, host_memory

SHARD = Shard(range(1), range(1), 16, 4, 0, 2)


class OnDevice:
    """KV of which a pool is in device memory."""

    shards = (SHARD, SHARD)

    def memory(self, shard: int) -> object:
        return DeviceMemory(0, 0, 0) if shard else host_memory(2, SHARD.block_bytes)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def test_copies_of_device_memory_leave_the_event_loop_alone(threads: ThreadPoolExecutor) -> None:
    host = HostKvMemory([SHARD], [host_memory(2, SHARD.block_bytes)])
    assert isinstance(copying_of(host, threads), InPasses)
    assert isinstance(copying_of(cast(KvMemory, OnDevice()), threads), InThreads)


async def test_copies_take_short_turns_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_module, "TURN_SECONDS", 0.0)
    copying, order = InPasses(), list[str]()

    def steps(name: str) -> Iterator[None]:
        for number in range(3):
            order.append(f"{name}{number}")
            yield

    async def beside() -> None:
        while "b2" not in order:
            order.append("-")
            await asyncio.sleep(0)

    await asyncio.gather(copying(steps("a")), copying(steps("b")), beside())
    assert [each for each in order if each != "-"] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert all("-" in (one, other) for one, other in pairwise(order))


async def test_threads_take_all_steps(threads: ThreadPoolExecutor) -> None:
    found = set[int]()

    def steps() -> Iterator[None]:
        for _ in range(3):
            found.add(threading.get_ident())
            yield

    await InThreads(threads)(steps())
    assert len(found) == 1
    assert threading.get_ident() not in found


@pytest.mark.parametrize("in_threads", [False, True])
async def test_step_that_fails_ends_the_copy(threads: ThreadPoolExecutor, in_threads: bool) -> None:
    copying: Copying = InThreads(threads) if in_threads else InPasses()

    def steps() -> Iterator[None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await copying(steps())
    await copying(iter([None]))
