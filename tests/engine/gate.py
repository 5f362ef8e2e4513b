"""Where the deliveries of a backend pass, so that a test can hold it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 60.0
"""How long a delivery waits at most: a test that fails inside must not leave a thread behind."""


class Gate:
    """Open, but while a test holds it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which a backend gets no further than its next delivery. It may await where a backend delivers on a
        thread of its own; one that delivers on the event loop's would wait there for the block, and the block for it.
        """
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def passed(self) -> None:
        """Returns when it is open."""
        self._open.wait(SECONDS)
