"""Watching a router across lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from trtmesh.chassis.errors import DeadlineExceeded, TrtmeshError, Unavailable
from trtmesh.cli.output import say

AGAIN_SECONDS = 1.0
"""Pause before a lost router is asked again."""

T = TypeVar("T")


async def repeated(ask: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
    """Yields the answers of a router, asked again and again. Raises the error of the first call."""
    yield await ask()
    lost = Lost()
    while True:
        try:
            answer = await ask()
        except (Unavailable, DeadlineExceeded) as error:
            await lost.wait(error)
        else:
            lost.over()
            yield answer


async def followed(follow: Callable[[], AsyncGenerator[T, None]]) -> AsyncIterator[T]:
    """Yields the messages of a stream, and reopens the stream at each end. Raises the error of a first stream without
    messages."""
    lost, told = Lost(), False
    while True:
        try:
            async with aclosing(follow()) as messages:
                async for message in messages:
                    told = True
                    lost.over()
                    yield message
            raise Unavailable("the router ended the list")
        except (Unavailable, DeadlineExceeded) as error:
            if not told:
                raise
            await lost.wait(error)


class Lost:
    """Reports the loss of a router once, and the return once."""

    def __init__(self) -> None:
        self._said = False

    async def wait(self, error: TrtmeshError) -> None:
        if not self._said:
            say(f"the router is lost, and asked again every second: {error}")
        self._said = True
        await asyncio.sleep(AGAIN_SECONDS)

    def over(self) -> None:
        if self._said:
            say("the router is back")
        self._said = False
