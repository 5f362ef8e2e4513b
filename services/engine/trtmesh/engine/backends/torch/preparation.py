"""The parts of an item that are made off the step loop, before its first step: prompt table, grammar, logits of drafts.

They take from microseconds to seconds, so threads make them: neither the event loop nor the steps wait. Meanwhile the
sequences of the item wait in the queue, and can be stopped like all others. Requests take turns: many items of one do
not delay those of another.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from trtmesh.chassis.errors import BackendFailed, TrtmeshError, forget_frames
from trtmesh.chassis.fair.turns import Rotation
from trtmesh.chassis.logs import request_id_bound

log = logging.getLogger(__name__)

Done = Callable[[Any], None]
"""Takes the part or a TrtmeshError, on the thread that made it."""


class Unwanted(Exception):
    """Ends the making of a part."""


class PartLease:
    """The size of a part, counted until all holders have given it back."""

    def __init__(self, size: int, holders: int, freed: Callable[[int], None]) -> None:
        self._size = size
        self._holders = holders
        self._freed = freed
        self._lock = threading.Lock()

    @property
    def holders(self) -> int:
        """How many have not given it back, the making included."""
        return self._holders

    def check(self) -> None:
        """Raises Unwanted without a holder besides the caller."""
        if self._holders <= 1:
            raise Unwanted

    def give_back(self) -> None:
        """Called once by each holder."""
        with self._lock:
            self._holders -= 1
            over = not self._holders
        if over:
            self._freed(self._size)


class Preparation:
    """Threads that make the parts of one kind, whose sizes together stay within `most`."""

    def __init__(self, name: str, most: int, threads: int = 1) -> None:
        self._most = most
        self._lock = threading.Lock()
        self.held = 0
        """The sizes of all parts with a lease, together."""
        self._queue = Rotation[Callable[[], None]]()
        """By request."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def begin(
        self,
        request_id: str,
        what: str,
        make: Callable[[PartLease], object],
        size: int,
        holders: int,
        done: Done,
    ) -> PartLease | None:
        """Queues a part for `holders` sequences, unless all of them leave before its turn; `make` may raise Unwanted if
        they leave later, and `what` describes a fault. Returns None without room for its size."""
        with self._lock:
            if self.held + size > self._most:
                return None
            self.held += size
            # The making is a holder too.
            lease = PartLease(size, holders + 1, self._free)
            self._queue.add(request_id, partial(self._make, request_id, what, make, lease, done))
        self._threads.submit(self._make_next)
        return lease

    def close(self) -> None:
        """Waits for the parts being made and drops the queue."""
        self._threads.shutdown(cancel_futures=True)

    def _make_next(self) -> None:
        with self._lock:
            _, make = self._queue.take()
        make()

    def _make(
        self,
        request_id: str,
        what: str,
        make: Callable[[PartLease], object],
        lease: PartLease,
        done: Done,
    ) -> None:
        part: object
        try:
            lease.check()
            part = make(lease)
        except Unwanted:
            lease.give_back()
            return
        except TrtmeshError as error:
            forget_frames(error)
            part = error
        except BaseException as error:
            # A panic of a library in Rust is no Exception.
            with request_id_bound(request_id):
                log.exception("a %s", what)
            part = BackendFailed(f"the {what}: {error}")
        # First: the count must be right when the item ends.
        lease.give_back()
        done(part)

    def _free(self, size: int) -> None:
        with self._lock:
            self.held -= size
