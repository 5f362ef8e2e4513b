"""What clients may expect of adapters while these change: each version with its time in force.

Time counts the events of the test. An item may use any version that was in force between its submission and its start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import count

from chaos.tiny_adapters import TinyAdapter


@dataclass(eq=False)
class Span:
    """A version under a name; without an adapter, a time in which the name may be unknown."""

    adapter: TinyAdapter | None
    version: str
    since: int
    share: float = 1.0
    until: float = math.inf


@dataclass(eq=False)
class Known:
    """An adapter by its name, or by its number where requests bring the weights."""

    name: str
    number: int
    is_brought: bool = False
    is_registered: bool = True
    """False for an adapter that only workers know."""
    spans: list[Span] = field(default_factory=list)

    @property
    def current(self) -> Span | None:
        """The newest version in force that is no canary."""
        return next((each for each in reversed(self.in_force) if each.share == 1.0), None)

    @property
    def canary(self) -> Span | None:
        return next((each for each in self.in_force if each.share != 1.0), None)

    @property
    def in_force(self) -> list[Span]:
        return [each for each in self.spans if each.until == math.inf and each.adapter]

    def between(self, since: int, until: int) -> list[Span]:
        """The versions that an item may use."""
        return [each for each in self.spans if each.since <= until and each.until >= since]


class History:
    """The adapters of a test."""

    def __init__(self) -> None:
        self._clock = count(1)
        self.known: dict[str, Known] = {}

    def now(self) -> int:
        """A new point in time."""
        return next(self._clock)

    def know(self, known: Known) -> Known:
        """Adds a name, unknown to the mesh so far."""
        self.known[known.name] = known
        known.spans.append(Span(None, "", self.now()))
        return known

    def begin(self, known: Known, adapter: TinyAdapter, version: str, share: float = 1.0) -> Span:
        """A version may be in force from now on."""
        span = Span(adapter, version, self.now(), share)
        known.spans.append(span)
        return span

    def forget(self, known: Known) -> list[Span]:
        """The name may be unknown from now on; returns the versions to `end`."""
        ending = known.in_force
        known.spans.append(Span(None, "", self.now()))
        return ending

    def end(self, spans: list[Span]) -> None:
        """Versions are no longer in force."""
        for span in spans:
            span.until = self.now()
