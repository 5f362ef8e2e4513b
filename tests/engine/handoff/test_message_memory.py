"""Memory of messages is lent again once nothing refers to it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from trtmesh.engine.handoff.messages import (
    LENT_BYTES,
    MAX_KEPT,
    MESSAGE_BYTES,
    MessageMemory,
)

LEAST = LENT_BYTES.start


def address(memory: memoryview) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data


def test_memory_returns_with_its_last_view() -> None:
    memory = MessageMemory()
    one, other = memory.take(MESSAGE_BYTES), memory.take(LEAST)
    assert (len(one), len(other)) == (MESSAGE_BYTES, LEAST)
    first, second = address(one), address(other)
    part = np.frombuffer(one[8:], dtype=np.uint8)
    del one
    third = memory.take(LEAST + 5)
    assert address(third) not in (first, second)
    del part
    assert address(memory.take(LEAST + 9)) == first


def test_memory_in_use_keeps_its_content() -> None:
    memory = MessageMemory()
    used = [memory.take(LEAST) for _ in range(MAX_KEPT + 5)]
    for number, each in enumerate(used):
        each[-9:] = bytes((number,)) * 9
    assert [bytes(each[-9:]) for each in used] == [bytes((n,)) * 9 for n in range(MAX_KEPT + 5)]


def test_kept_memory_is_limited() -> None:
    memory = MessageMemory()
    used = [memory.take(LEAST) for _ in range(MAX_KEPT + 5)]
    addresses = {address(each) for each in used}
    assert len(addresses) == MAX_KEPT + 5
    used.clear()
    assert len(memory._free) == MAX_KEPT


@pytest.mark.parametrize("size", [LEAST - 1, MESSAGE_BYTES + 1])
def test_messages_of_other_sizes_get_their_own(size: int) -> None:
    memory = MessageMemory()
    own = memory.take(size)
    assert len(own) == size
    del own
    assert not memory._free


@pytest.mark.parametrize("size", [2**14, 2**16, LEAST - 1, LEAST])
def test_messages_hold_no_more_than_twice_their_bytes(size: int) -> None:
    memory, count = MessageMemory(), 2**23 // size
    tracemalloc.start()
    try:
        used = [memory.take(size) for _ in range(count)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(used) == count
    # Beside the bytes, each message has objects of Python.
    assert held <= count * (2 * size + 2**12)
