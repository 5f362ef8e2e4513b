"""Limits of how often a peer does something."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True, slots=True, eq=False)
class Rate:
    """A limit: `burst` at once, then `per_second`."""

    what: str
    burst: int
    per_second: float
    per_served: int = 0
    """How many more each call allows that is served. A gateway has the calls of many clients on a connection, and some
    of them always leave or are wrong."""
    per_opened: int = 0
    """How many more each call allows, served or not."""


@dataclass(slots=True)
class _Level:
    """The level of a leaky bucket at a time, and how many calls were served and opened until then."""

    level: float
    at: float
    served: int
    opened: int


class RateCounts:
    """Counts what one peer did recently."""

    def __init__(self) -> None:
        self._levels: dict[Rate, _Level] = {}
        self._served = self._opened = 0

    def note_opened(self) -> None:
        """A call is opened on the connection, by either side."""
        self._opened += 1

    def note_served(self) -> None:
        """A call of the peer has a response."""
        self._served += 1

    def exceeds(self, rate: Rate) -> bool:
        """Counts one. Returns whether it is beyond the limit."""
        now = monotonic()
        last = self._levels.get(rate)
        level = 1.0
        if last is not None:
            paid = (now - last.at) * rate.per_second
            paid += (self._served - last.served) * rate.per_served
            paid += (self._opened - last.opened) * rate.per_opened
            level += max(0.0, last.level - paid)
        self._levels[rate] = _Level(level, now, self._served, self._opened)
        return level > rate.burst
