"""In which order what is only kept for reuse is given up."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

DEFAULT_PRIORITY = 35
"""Priority of what nobody gave one; TensorRT-LLM's."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How dear a block is: `priority` from 0 to 100, for `seconds` from when it becomes idle, or for ever."""

    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None


DEFAULT = Retention()


class EvictionOrder:
    """Numbers of idle blocks: the lowest priority goes first, and among equals the one that came first.

    A priority whose time is over becomes the default; its block then counts as one that came at that moment, as in
    TensorRT-LLM.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[int, OrderedDict[int, None]] = {}
        self._retention_of: dict[int, Retention] = {}
        self._expiry_of: dict[int, float] = {}
        # Also holds what was discarded since, which is skipped when its time comes.
        self._expiries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._retention_of)

    def __contains__(self, number: int) -> bool:
        return number in self._retention_of

    def add(self, number: int, retention: Retention) -> None:
        """Puts in a number that is not there, as the last of its priority."""
        self._expire()
        self._queue(number, retention)
        if retention.seconds is not None and retention.priority != DEFAULT_PRIORITY:
            self._expiry_of[number] = expiry = self._clock() + retention.seconds
            heapq.heappush(self._expiries, (expiry, number))
            self._tidy()

    def discard(self, number: int) -> Retention:
        """Takes out a number that is there; returns what it was kept with, the default where that is over."""
        self._expire()
        return self._unqueue(number)

    def pop(self) -> tuple[int, Retention]:
        """Takes out the first; returns its number and for how long it would have been how dear."""
        self._expire()
        number = next(iter(self._queues[min(self._queues)]))
        expiry = self._expiry_of.get(number)
        retention = self._unqueue(number)
        if expiry is not None:
            retention = replace(retention, seconds=expiry - self._clock())
        return number, retention

    def _queue(self, number: int, retention: Retention) -> None:
        self._retention_of[number] = retention
        self._queues.setdefault(retention.priority, OrderedDict())[number] = None

    def _unqueue(self, number: int) -> Retention:
        retention = self._retention_of.pop(number)
        queue = self._queues[retention.priority]
        del queue[number]
        if not queue:
            del self._queues[retention.priority]
        self._expiry_of.pop(number, None)
        return retention

    def _expire(self) -> None:
        if not self._expiries:
            return
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expiry, number = heapq.heappop(self._expiries)
            if self._expiry_of.get(number) == expiry:
                self._unqueue(number)
                self._queue(number, DEFAULT)

    def _tidy(self) -> None:
        if len(self._expiries) > 2 * len(self._expiry_of) + 64:
            self._expiries = [(expiry, number) for number, expiry in self._expiry_of.items()]
            heapq.heapify(self._expiries)
