"""asyncio's event loop, as tests run on it: a transport that a test leaves open fails this test, and no later one."""

from __future__ import annotations

import asyncio
import random
import socket
import warnings
from asyncio.selector_events import BaseSelectorEventLoop
from selectors import SelectorKey
from typing import Any

import pytest

Loop: Any = BaseSelectorEventLoop
_accept, _close, _process = Loop._accept_connection2, Loop.close, Loop._process_events

PASSES = (0, 0, 0, 1, 2, 3, 4, 6, 9)
"""By how many passes of its event loop a socket may be late."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late", type=int, help="seed of random delays of sockets in this process")


def pytest_configure(config: pytest.Config) -> None:
    guard_transports()
    if (seed := config.getoption("--late")) is not None:
        delay_sockets(random.Random(seed))


def delay_sockets(chance: random.Random) -> None:
    """Has sockets become ready some passes late, as on a busy machine: what is done in the order in which others
    answer then shows in other orders too."""
    late = dict[tuple[int, int], int]()

    def process(loop: Any, events: list[tuple[SelectorKey, int]]) -> None:
        """Takes some of the events; a selector tells of the others again."""
        due = list[tuple[SelectorKey, int]]()
        for key, mask in events:
            left = late.pop((id(loop), key.fd), None)
            if left is None:
                left = chance.choice(PASSES)
            if left:
                late[id(loop), key.fd] = left - 1
            else:
                due.append((key, mask))
        _process(loop, due)

    Loop._process_events = process


def guard_transports() -> None:
    """Changes asyncio in this process."""
    Loop._accept_connection2 = _accept_unless_closed
    Loop.close = _close_all


async def _accept_unless_closed(
    loop: Any,
    factory: Any,
    connection: socket.socket,
    extra: Any,
    context: Any,
    server: asyncio.Server,
    *more: Any,
    **named: Any,
) -> None:
    """Accepts nothing for a server that was closed a moment ago: asyncio would fail in the middle, and leave the
    transport to the collector of garbage (https://github.com/python/cpython/issues/109564). uvloop, on which services
    run, closes it."""
    if server.is_serving():
        await _accept(loop, factory, connection, extra, context, server, *more, **named)
    else:
        connection.close()


def _close_all(loop: Any) -> None:
    """Closes the loop, and warns of transports that are open until then."""
    left = [each for each in loop._transports.values() if each._sock is not None]
    names = [f"{each!r} of {each.get_protocol()!r}" for each in left]
    if left and not loop.is_closed():
        for each in left:
            each.abort()
        loop.run_until_complete(asyncio.sleep(0))
    _close(loop)
    if names:
        warnings.warn(f"transports left open: {', '.join(names)}", ResourceWarning, stacklevel=2)
