"""A loop with virtual time, over real sockets: time passes only while nothing travels between client and server, so
that every arrival has its scripted time, however busy the machine is."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from trtmesh.tools.bench.reception import Reception
from trtmesh.tools.bench.record import Plan
from trtmesh.tools.bench.targets.target import Target

PATIENCE_SECONDS = 60.0
"""Of real time for what travels; only a broken test waits as long."""

T = TypeVar("T")


class Travelling:
    """Messages under way, by the text of their prompt."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def begin(self, key: str) -> None:
        """The request itself is under way."""
        self.counts[key] = 1

    def add(self, key: str, number: int = 1) -> None:
        if key in self.counts:
            self.counts[key] += number

    def end(self, key: str) -> None:
        self.counts.pop(key, None)

    @property
    def any(self) -> bool:
        return any(self.counts.values())


class _Selector(selectors.DefaultSelector):
    """Passes the time of the loop instead of waiting."""

    def __init__(self, travelling: Travelling) -> None:
        super().__init__()
        self.now = 1000.0
        self._travelling = travelling
        self._waits_since: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        if events := super().select(0):
            self._waits_since = None
            return events
        if timeout is not None and timeout <= 0:
            return []
        if timeout is not None and not self._travelling.any:
            self.now += timeout
            return []
        self._waits_since = self._waits_since or time.monotonic()
        if time.monotonic() - self._waits_since > PATIENCE_SECONDS:
            raise AssertionError(f"nothing comes; under way: {self._travelling.counts}")
        return super().select(0.5)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock begins at 1000 s."""

    def __init__(self, travelling: Travelling) -> None:
        self._virtual = _Selector(travelling)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Callable[[Travelling], Coroutine[Any, Any, T]]) -> T:
    """Runs a test in virtual time."""
    travelling = Travelling()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(travelling)) as runner:
        return runner.run(main(travelling))


class Seen:
    """A reception that tells what has arrived."""

    def __init__(self, reception: Reception, travelling: Travelling, key: str) -> None:
        self._reception = reception
        self._travelling = travelling
        self._key = key

    def chunk(self, *given: Any, **named: Any) -> None:
        before = self._travelling
        self._reception.chunk(*given, **named)
        before.add(self._key, -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reception, name)


class SeenTarget:
    """A target whose messages count as travelling until they arrive."""

    release = ""

    def __init__(self, target: Target, travelling: Travelling) -> None:
        self._target = target
        self._travelling = travelling

    async def answer(self, plan: Plan, reception: Reception) -> None:
        key = plan.prompts[0].whole_text
        self._travelling.begin(key)
        try:
            seen: Any = Seen(reception, self._travelling, key)
            await self._target.answer(plan, seen)
        finally:
            self._travelling.end(key)
