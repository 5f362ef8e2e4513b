"""What is still there though it is over: services hardly collect garbage, so what is over must be freed at once, by
counting references."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Nobody collects garbage in the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(kind: type) -> list[object]:
    """The objects of just this type."""
    return [each for each in gc.get_objects() if type(each) is kind]
