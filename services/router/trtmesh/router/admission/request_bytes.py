"""Bounds the memory of large requests, which are kept to the end: another worker may have to continue them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from trtmesh.chassis.errors import InvalidField, QueueFull
from trtmesh.chassis.fair.large import LARGE_BYTES


class RequestBytes:
    """Counts the bytes of all large requests of a router; `max_items` bounds the smaller ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def holding(self, size: int) -> AbstractContextManager[None]:
        """The block in which a request of so many bytes exists, from its arrival to its end. Entering raises
        QueueFull, or InvalidField for more than ever fit."""
        return nullcontext() if size < LARGE_BYTES else self._holding(size)

    @contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        if size > self._limit:
            raise InvalidField.of(
                "request", f"{size} bytes", f"at most {self._limit} (admission.max_request_bytes)"
            )
        if self.held + size > self._limit:
            raise QueueFull.of(
                self._limit,
                f"large requests have {self.held} bytes and this one {size}; all may have {self._limit}"
                " (admission.max_request_bytes)",
            )
        self.held += size
        try:
            yield
        finally:
            self.held -= size
