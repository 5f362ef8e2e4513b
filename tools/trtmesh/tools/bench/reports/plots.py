"""What plots show, and where in the image; `plot.html` draws them as SVG, so that a page needs nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from trtmesh.tools.bench.pools import Values

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, WIDTH - 16.0, 12.0, HEIGHT - 42.0
TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    has_line: bool = True
    has_dots: bool = False
    labels: Sequence[str] = ()
    """Of the points."""


@dataclass(frozen=True, slots=True)
class Band:
    """A time in which something happened."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places in the image."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(each) if self.is_log else each)
            for each in (self.low, self.high, max(value, self.low))
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> Sequence[float]:
        marks = self._decades() if self.is_log else []
        if len(marks) > 1:
            return marks
        step = _step((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _decades(self) -> Sequence[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if len(decades) <= 4 else (1,)
        marks = [digit * 10.0**decade for decade in decades for digit in digits]
        return [mark for mark in marks if self.low <= mark <= self.high]


def _step(least: float) -> float:
    """The next of 1, 2, 5, 10, ..."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step for digit in (1, 2, 5, 10) if (step := digit * power) >= least * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    is_log: bool = False
    """The scale of x, for values above 0 alone."""
    x: Scale = field(init=False)
    y: Scale = field(init=False)

    def __post_init__(self) -> None:
        points = [point for each in self.series for point, _ in self.shown(each)]
        edges = [edge for band in self.bands for edge in (band.start, band.end)]
        values = [*(x for x, _ in points), *edges] or [1.0]
        low, high = min(values), max(values)
        if not self.is_log:
            low = min(low, 0.0)
        if high <= low:
            low, high = (low / 2, low * 2) if self.is_log else (low, low + 1)
        top = max([1e-9, *(y for _, y in points)])
        object.__setattr__(self, "x", Scale(low, high, LEFT, RIGHT, self.is_log))
        object.__setattr__(self, "y", Scale(0.0, top * 1.06, BOTTOM, TOP))

    def shown(self, series: Series) -> Sequence[tuple[Point, str]]:
        """The points that have a place, with their labels."""
        labels = [*series.labels, *[""] * (len(series.points) - len(series.labels))]
        return [
            (point, label)
            for point, label in zip(series.points, labels, strict=False)
            if all(map(math.isfinite, point)) and (point[0] > 0 or not self.is_log)
        ]


def short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def steps(edges: Values, values: Values) -> Sequence[Point]:
    """Each value holds from its edge to the next."""
    places = np.repeat(edges, 2)[1:-1].tolist()
    return [*zip(places, np.repeat(values, 2).tolist(), strict=True)]


def cumulative(values: Values, points: int = 200) -> Sequence[Point]:
    """The share, in percent, of values up to each; of many values so many points."""
    if not values.size:
        return []
    shares = np.linspace(0, 100, min(points, values.size + 1))
    return [*zip(np.percentile(values, shares).tolist(), shares.tolist(), strict=True)]
