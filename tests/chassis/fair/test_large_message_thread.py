"""Large messages are parsed one at a time, with rests between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from threading import Event
from time import perf_counter, sleep
from weakref import ref

import pytest
from leaks import gone, without_collector
from trtmesh.chassis.fair.messages import LARGE_BYTES, LargeMessageThread

SECONDS = 0.05


async def test_a_rest_follows_a_large_message_and_none_a_small_one() -> None:
    parsing, times = LargeMessageThread(), list[tuple[float, float]]()

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
    parsing = LargeMessageThread()
    with pytest.raises(ZeroDivisionError):
        await parsing.run(LARGE_BYTES, lambda: 1 // 0)
    assert await parsing.run(LARGE_BYTES, lambda: 2) == 2


async def first_of(parsing: LargeMessageThread) -> tuple[asyncio.Task[None], Event]:
    """A message that is being parsed until the event is set."""
    begins, goes_on = Event(), Event()

    def parse() -> None:
        begins.set()
        goes_on.wait()

    task = asyncio.create_task(parsing.run(LARGE_BYTES, parse))
    await asyncio.to_thread(begins.wait)
    return task, goes_on


async def kept_of_one_that_leaves(parsing: LargeMessageThread) -> object:
    """What is left of a message whose client leaves while it waits."""
    message = _Message()
    kept = ref(message)
    task = asyncio.create_task(parsing.run(LARGE_BYTES, message.parse))
    del message
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    del task
    return kept()


async def test_a_message_whose_client_leaves_before_its_turn_is_not_kept() -> None:
    parsing = LargeMessageThread()
    first, goes_on = await first_of(parsing)
    assert await kept_of_one_that_leaves(parsing) is None
    goes_on.set()
    await first


async def test_a_turn_lasts_until_the_thread_is_done_with_a_message_whose_client_left() -> None:
    parsing = LargeMessageThread()
    first, goes_on = await first_of(parsing)
    first.cancel()
    await asyncio.wait([first])
    assert await kept_of_one_that_leaves(parsing) is None
    goes_on.set()
    assert await parsing.run(LARGE_BYTES, lambda: 3) == 3


async def test_a_large_message_is_held_until_it_is_read() -> None:
    parsing, held = LargeMessageThread(), list[str]()

    @contextmanager
    def holding() -> Iterator[None]:
        held.append("waits")
        try:
            yield
        finally:
            held.append("is read")

    def parse() -> list[str]:
        return [*held]

    assert await parsing.run(LARGE_BYTES - 1, parse, held=holding) == []
    assert await parsing.run(LARGE_BYTES, parse, held=holding) == ["waits"]
    assert held == ["waits", "is read"]


async def test_a_request_that_has_begun_goes_before_those_that_have_not() -> None:
    parsing, order = LargeMessageThread(), list[str]()
    first, goes_on = await first_of(parsing)
    tasks = [first]
    for name, begun in (("a", False), ("b", False), ("c", False), ("next", True)):
        append = partial(order.append, name)
        tasks.append(asyncio.create_task(parsing.run(LARGE_BYTES, append, begun=begun)))
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "next", "b", "c"]


class _Message:
    def parse(self) -> None:
        """Never called."""

    def fail(self) -> None:
        raise ZeroDivisionError


async def test_a_message_that_fails_is_not_kept() -> None:
    """Services rarely collect garbage."""
    parsing = LargeMessageThread()
    with without_collector():
        message = _Message()
        with suppress(ZeroDivisionError):
            await parsing.run(LARGE_BYTES, message.fail)
        del message
        await gone(_Message)
