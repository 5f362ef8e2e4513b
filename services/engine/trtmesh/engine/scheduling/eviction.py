"""The order in which idle blocks are evicted."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

DEFAULT_PRIORITY = 35
"""The priority without a wish, as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A `priority` from 0 to 100, held for `seconds` from the moment the block first becomes idle; None: no limit."""

    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None
    expiry: float | None = None
    """The end of the seconds, once they began; later use of the block does not move it."""


DEFAULT = Retention()


class EvictionOrder:
    """Numbers of idle blocks: the lowest priority goes first, and among equals the least recently added.

    An expired priority becomes the default, and its block counts as added at that moment, as in TensorRT-LLM.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[int, OrderedDict[int, None]] = {}
        self._retention_of: dict[int, Retention] = {}
        # Discarded numbers stay and are skipped when their time comes.
        self._expiries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._retention_of)

    def __contains__(self, number: int) -> bool:
        return number in self._retention_of

    def add(self, number: int, retention: Retention) -> None:
        """Adds a new number as the last of its priority."""
        self._expire()
        if retention.seconds is None or retention.priority == DEFAULT_PRIORITY:
            self._queue(number, retention)
            return
        now = self._clock()
        expiry = now + retention.seconds if retention.expiry is None else retention.expiry
        if expiry <= now:
            self._queue(number, DEFAULT)
            return
        self._queue(number, replace(retention, expiry=expiry))
        heapq.heappush(self._expiries, (expiry, number))
        self._tidy()

    def discard(self, number: int) -> Retention:
        """Removes a number; returns its retention, the default once expired."""
        self._expire()
        return self._unqueue(number)

    def pop(self) -> tuple[int, Retention]:
        """Removes the first number; returns it with its retention."""
        self._expire()
        number = next(iter(self._queues[min(self._queues)]))
        return number, self._unqueue(number)

    def _queue(self, number: int, retention: Retention) -> None:
        self._retention_of[number] = retention
        self._queues.setdefault(retention.priority, OrderedDict())[number] = None

    def _unqueue(self, number: int) -> Retention:
        retention = self._retention_of.pop(number)
        queue = self._queues[retention.priority]
        del queue[number]
        if not queue:
            del self._queues[retention.priority]
        return retention

    def _expire(self) -> None:
        if not self._expiries:
            return
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expiry, number = heapq.heappop(self._expiries)
            retention = self._retention_of.get(number)
            if retention and retention.expiry == expiry:
                self._unqueue(number)
                self._queue(number, DEFAULT)

    def _tidy(self) -> None:
        if len(self._expiries) > 2 * len(self._retention_of) + 64:
            self._expiries = [
                (retention.expiry, number)
                for number, retention in self._retention_of.items()
                if retention.expiry is not None
            ]
            heapq.heapify(self._expiries)
