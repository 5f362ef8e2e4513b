"""Passes of the event loop between two slices of work that may wait.

A token crosses the router in about ten passes, since every hop (reader, sequence, outbox, writer) is a callback of its
own. With a slice of a burst's work in each pass it would wait for ten slices; with REST_PASSES between two slices it
waits for three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

REST_PASSES = 3

MOST_SECONDS = 0.005
"""Longest rest: passes full of running streams must not hold up new work."""


def after_rest(callback: Callable[[], None]) -> None:
    """Calls `callback` in the pass after a rest."""
    until = perf_counter() + MOST_SECONDS
    asyncio.get_running_loop().call_soon(_rest, REST_PASSES, until, callback)


# No closure: one that names itself is a cycle.
def _rest(passes: int, until: float, callback: Callable[[], None]) -> None:
    if passes and perf_counter() < until:
        asyncio.get_running_loop().call_soon(_rest, passes - 1, until, callback)
    else:
        callback()
