"""Finds leaked objects. Services rarely collect garbage, so reference counts alone must free finished objects."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 60.0


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns the collector off in the block; `alive` counts only objects made there."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def alive(*kinds: type) -> Counter[str]:
    """The number of objects of exactly these types, by name."""
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


async def gone(*kinds: type) -> None:
    """Waits until no object of exactly these types is left; messages in sockets may still free some."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while alive(*kinds):  # noqa: ASYNC110 - freeing sets no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"still there: {dict(alive(*kinds))}") from None
