"""Large messages are parsed one at a time, with rests between them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from time import perf_counter, sleep

import pytest
from trtmesh.router.doors.parsing import LARGE_BYTES, Parsing

SECONDS = 0.05


async def test_a_rest_follows_a_large_message_and_none_a_small_one() -> None:
    parsing, times = Parsing(), list[tuple[float, float]]()

    def parse() -> None:
        began = perf_counter()
        sleep(SECONDS)
        times.append((began, perf_counter()))

    await asyncio.gather(*(parsing.run(LARGE_BYTES, parse) for _ in range(3)))
    for (began, ended), (begins, _) in pairwise(times):
        assert begins - ended >= ended - began
    # On the event loop, whatever the thread does.
    resting = asyncio.create_task(parsing.run(LARGE_BYTES, parse))
    await asyncio.sleep(0)
    assert await parsing.run(LARGE_BYTES - 1, lambda: "small") == "small"
    assert not resting.done()
    await resting


async def test_a_message_that_fails_is_followed_by_the_next() -> None:
    parsing = Parsing()
    with pytest.raises(ZeroDivisionError):
        await parsing.run(LARGE_BYTES, lambda: 1 // 0)
    assert await parsing.run(LARGE_BYTES, lambda: 2) == 2
