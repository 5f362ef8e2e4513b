"""A gate for the deliveries of a backend, so that a test can hold the backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 60.0
"""Longest wait of a delivery: a test that fails inside the block must not leave a thread behind."""


class Gate:
    """Open unless a test holds the gate."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stops the backend at the next delivery. The block may await only if the backend delivers on its own thread; a
        backend on the event loop would deadlock."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def passed(self) -> None:
        """Waits until the gate is open."""
        self._open.wait(SECONDS)
