"""Messages are written in order: by a callback where nothing must wait, and by the task of `forward` else."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from trtmesh.chassis.forwarding import Forwarder


class Numbers(Forwarder[int]):
    """A queue of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = deque[int]()

    def take(self) -> int | None:
        return self.waiting.popleft() if self.waiting else None

    def put(self, *numbers: int) -> None:
        self.waiting += numbers
        self.wake()

    def close(self) -> None:
        self.closed = True
        self.wake()


class Peer:
    """A sink that may have no room."""

    def __init__(self) -> None:
        self.at_once: list[int] = []
        self.written: list[int] = []
        self.room = asyncio.Event()
        self.room.set()
        self.error: Exception | None = None

    def write_now(self, number: int) -> bool:
        if self.error is not None:
            raise self.error
        if self.room.is_set():
            self.at_once.append(number)
            self.written.append(number)
        return self.room.is_set()

    async def write(self, number: int) -> None:
        await self.room.wait()
        self.written.append(number)


async def begun(numbers: Numbers, peer: Peer) -> asyncio.Task[None]:
    task = asyncio.create_task(numbers.forward(peer))
    await asyncio.sleep(0)
    return task


async def test_messages_of_a_pass_are_written_in_the_next() -> None:
    numbers, peer = Numbers(), Peer()
    task = await begun(numbers, peer)
    numbers.put(1)
    numbers.put(2, 3)
    await asyncio.sleep(0)
    assert peer.at_once == [1, 2, 3]
    numbers.close()
    await task


async def test_order_is_kept_over_a_wait() -> None:
    numbers, peer = Numbers(), Peer()
    task = await begun(numbers, peer)
    numbers.put(1)
    await asyncio.sleep(0)
    peer.room.clear()
    numbers.put(2, 3)
    for _ in range(5):
        await asyncio.sleep(0)
        numbers.put(4)
    assert peer.written == [1]
    peer.room.set()
    for _ in range(5):
        await asyncio.sleep(0)
    numbers.put(5)
    await asyncio.sleep(0)
    assert peer.written == [1, 2, 3, *[4] * 5, 5]
    assert peer.at_once == [1, 5]
    numbers.close()
    await task


async def test_task_writes_the_last_message_and_ends() -> None:
    numbers, peer = Numbers(), Peer()
    task = await begun(numbers, peer)
    numbers.put(1)
    numbers.close()
    await task
    assert (peer.written, peer.at_once) == ([1], [])


async def test_error_of_a_write_ends_it() -> None:
    numbers, peer = Numbers(), Peer()
    task = await begun(numbers, peer)
    peer.error = ZeroDivisionError("no peer")
    numbers.put(1)
    with pytest.raises(ZeroDivisionError, match="no peer"):
        await task
