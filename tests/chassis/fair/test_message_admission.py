"""Messages on their way to a request: large ones count, and are read in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident

import pytest
from trtmesh.chassis.errors import QueueFull
from trtmesh.chassis.fair.messages import LARGE_BYTES, MessageAdmission, ReceivedMessage


class Counted:
    """Counts bytes, and refuses more than there is room for."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held = 0

    @contextmanager
    def __call__(self, size: int) -> Iterator[None]:
        if self.held + size > self.room:
            raise QueueFull.of(self.room, "full")
        self.held += size
        try:
            yield
        finally:
            self.held -= size


@pytest.mark.parametrize("size", [LARGE_BYTES - 1, LARGE_BYTES])
async def test_large_messages_are_read_in_a_thread(size: int) -> None:
    unread = Counted(LARGE_BYTES)

    def parse(*, is_large: bool) -> tuple[bool, bool, int]:
        return is_large, get_ident() != own, unread.held

    own, large = get_ident(), size == LARGE_BYTES
    message = ReceivedMessage(MessageAdmission(), size, unread)
    assert await message.read(parse) == (large, large, size if large else 0)
    # A later step holds nothing unread.
    assert await message.run(partial(parse, is_large=False)) == (False, large, 0)
    assert unread.held == 0


async def test_a_step_is_as_long_as_its_weight_says() -> None:
    message = ReceivedMessage(MessageAdmission(), LARGE_BYTES // 16)
    assert await message.run(get_ident) == get_ident()
    assert await message.run(get_ident, 16) != get_ident()


async def test_a_request_counts_until_its_block_ends() -> None:
    requests = Counted(10)
    admission = MessageAdmission(requests)
    with ReceivedMessage(admission, 7).admitted():
        assert requests.held == 7
        with pytest.raises(QueueFull), ReceivedMessage(admission, 4).admitted():
            raise AssertionError
    assert requests.held == 0


async def test_requests_that_have_begun_go_before_those_that_have_not() -> None:
    admission, order = MessageAdmission(), list[str]()
    messages = {name: ReceivedMessage(admission, LARGE_BYTES) for name in "abcd"}
    await messages["a"].run(partial(order.append, "a"))
    # While b has its turn, c waits for the next, and d to wait for one.
    await asyncio.gather(*(messages[name].run(partial(order.append, name)) for name in "bcda"))
    assert "".join(order) == "abcad"
