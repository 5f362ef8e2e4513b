"""Messages are written in order, without blocking the event loop."""

from __future__ import annotations

import asyncio
from functools import partial

from trtmesh.router.streams.client_stream import WRITES_PER_PASS, WriteScheduler


async def test_pass_of_the_loop_writes_a_bounded_number_in_order() -> None:
    writes, written = WriteScheduler(), list[int]()
    count = WRITES_PER_PASS * 2 + 1
    for number in range(count):
        writes.ask(partial(written.append, number))
    after = []
    while len(written) < count:
        await asyncio.sleep(0)
        after.append(len(written))
    assert after == [WRITES_PER_PASS, WRITES_PER_PASS * 2, count]
    assert written == list(range(count))
