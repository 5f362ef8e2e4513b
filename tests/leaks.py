"""Finds leaked objects. Services rarely collect garbage, so reference counts alone must free every finished object."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 60.0


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns the collector off in the block; `alive` counts only what was made in it."""
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
    """Waits until no object of exactly these types is left; a message that frees one may still be in a socket."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while alive(*kinds):  # noqa: ASYNC110 - freeing sets no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"still there: {dict(alive(*kinds))}") from None
