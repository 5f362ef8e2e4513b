"""A queue with a bounded wait, for work without a free peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class WaitingRoom(Generic[W]):
    """Things in order of arrival. `give_up` gets everything still here after `seconds`."""

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
        """Removes one thing, if it is here."""
        if (timer := self._timers.pop(thing, None)) is not None:
            timer.cancel()

    def leave_first(self) -> W:
        """Removes the oldest thing; the room must not be empty."""
        thing = next(iter(self._timers))
        self.dismiss(thing)
        return thing

    def leave(self) -> list[W]:
        """Removes all things, in order of arrival."""
        things = list(self._timers)
        for thing in things:
            self.dismiss(thing)
        return things

    def _time_out(self, thing: W) -> None:
        del self._timers[thing]
        self._give_up(thing)
