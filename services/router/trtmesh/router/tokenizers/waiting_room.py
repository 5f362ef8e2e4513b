"""Where things wait that a peer cannot take now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class WaitingRoom(Generic[W]):
    """Things in the order of their arrival, each no longer here than a bounded time; then `give_up` is told."""

    def __init__(self, seconds: float, give_up: Callable[[W], None]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._timers: dict[W, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def admit(self, thing: W) -> None:
        loop = asyncio.get_running_loop()
        self._timers[thing] = loop.call_later(self._seconds, self._time_out, thing)

    def dismiss(self, thing: W) -> None:
        """Lets one thing go that does not wait any more."""
        if (timer := self._timers.pop(thing, None)) is not None:
            timer.cancel()

    def leave_first(self) -> W:
        """Lets the one go that came first; there must be one."""
        thing = next(iter(self._timers))
        self.dismiss(thing)
        return thing

    def leave(self) -> list[W]:
        """Empties the room; gives what was in it, in the order of arrival."""
        things = list(self._timers)
        for thing in things:
            self.dismiss(thing)
        return things

    def _time_out(self, thing: W) -> None:
        del self._timers[thing]
        self._give_up(thing)
