"""Figures of what is measured in turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from statistics import median
from typing import Any, TypeVar

Figures = dict[str, Any]
Name = TypeVar("Name")
Values = Mapping[str, float]


@dataclass(slots=True)
class Found:
    """Values of several runs by name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def note_all(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.note(name, value)

    def medians(self, digits: int = 2) -> Figures:
        return {name: round(median(each), digits) for name, each in self.values.items()}

    def ratios(self, before: Found) -> dict[str, list[float]]:
        """To the values of the same turns, by name. Threads that end take their time from the account of CPU, so that a
        figure may not be positive."""
        return {
            name: [
                own / other
                for own, other in zip(values, before.values[name], strict=True)
                if min(own, other) > 0
            ]
            for name, values in self.values.items()
        }

    def over(self, before: Found) -> Figures:
        """Medians of these ratios, where there are any."""
        ratios = self.ratios(before)
        return {name: round(median(each), 3) for name, each in ratios.items() if each}


def by_service(used_us: Values) -> Values:
    """CPU of each service by the name of a figure, and of all; none without a service."""
    total = {"services_us": sum(used_us.values())} if used_us else {}
    return {f"{name}_us": each for name, each in used_us.items()} | total


async def in_turn(
    sides: Mapping[Name, Callable[[], Values | Awaitable[Values]]], rounds: int
) -> dict[Name, Found]:
    """Measures the sides in turn, in alternating order, so that drift of the machine affects all; a first round warms
    up."""
    found = {name: Found() for name in sides}
    for turn in range(rounds + 1):
        for name in [*sides] if turn % 2 else reversed([*sides]):
            figures = sides[name]()
            values = await figures if isawaitable(figures) else figures
            if turn:
                found[name].note_all(values)
    return found
