"""asyncio's event loop, as tests run on it: a transport that a test leaves open fails this test, and no later one."""

from __future__ import annotations

import asyncio
import socket
import warnings
from asyncio.selector_events import BaseSelectorEventLoop
from typing import Any

Loop: Any = BaseSelectorEventLoop
_accept, _close = Loop._accept_connection2, Loop.close


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
