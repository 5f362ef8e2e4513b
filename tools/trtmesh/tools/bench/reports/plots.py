"""Plots as SVG, drawn here so that a page needs nothing from outside. Colours are the page's: series 0, 1, ..."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from html import escape

import numpy as np
from markupsafe import Markup
from trtmesh.chassis.quoting import escaped
from trtmesh.tools.bench.pools import Values

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 16.0, 12.0, 42.0
COLORS = 8
TICKS = 5

Point = tuple[float, float]


class Mark(StrEnum):
    """How the points of a series are drawn."""

    LINE = "line"
    STEPS = "steps"
    """Each value holds until the next."""
    DOTS = "dots"
    LINE_AND_DOTS = "line dots"


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    mark: Mark = Mark.LINE
    labels: Sequence[str] = ()
    """Of the points."""


@dataclass(frozen=True, slots=True)
class Band:
    """A time in which something happened."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x: str
    y: str
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    is_log: bool = False
    """The scale of x, for values above 0 alone."""


@dataclass(frozen=True, slots=True)
class _Scale:
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
        if not self.is_log:
            step = _step((self.high - self.low) / TICKS)
            first = math.ceil(self.low / step - 1e-9)
            return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if len(decades) <= 4 else (1,)
        marks = [digit * 10.0**decade for decade in decades for digit in digits]
        return [mark for mark in marks if self.low <= mark <= self.high]


def _step(least: float) -> float:
    """The next of 1, 2, 5, 10, ..."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step for digit in (1, 2, 5, 10) if (step := digit * power) >= least * (1 - 1e-9))


def svg(plot: Plot) -> Markup:
    """Text is escaped. A plot without a finite point says so."""
    plot = replace(plot, series=[_drawable(each, is_log=plot.is_log) for each in plot.series])
    points = [point for each in plot.series for point in each.points]
    if not points:
        return Markup('<p class="none">{}: no values</p>').format(plot.title)
    x = _x_scale(plot, [point[0] for point in points])
    top = max([1e-9, *(point[1] for point in points)])
    y = _Scale(0.0, top * 1.06, HEIGHT - BOTTOM, TOP)
    inside = [
        *(_band(band, x) for band in plot.bands),
        *_grid(x, y, plot),
        *(_series(each, number, x, y) for number, each in enumerate(plot.series)),
    ]
    # Everything from outside went through escape().
    return Markup(  # noqa: S704
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(escaped(plot.title))}">'
        + "".join(inside)
        + "</svg>"
    )


def _drawable(series: Series, *, is_log: bool) -> Series:
    """Without the points that have no place."""
    labels = [*series.labels, *[""] * (len(series.points) - len(series.labels))]
    kept = [
        (point, label)
        for point, label in zip(series.points, labels, strict=False)
        if all(map(math.isfinite, point)) and (point[0] > 0 or not is_log)
    ]
    shown = [label for _, label in kept] if series.labels else []
    return replace(series, points=[point for point, _ in kept], labels=shown)


def _x_scale(plot: Plot, values: Sequence[float]) -> _Scale:
    low, high = min(values), max(values)
    for band in plot.bands:
        low, high = min(low, band.start), max(high, band.end)
    if not plot.is_log:
        low = min(low, 0.0)
    if high <= low:
        low, high = (low / 2, low * 2) if plot.is_log else (low, low + 1)
    return _Scale(low, high, LEFT, WIDTH - RIGHT, plot.is_log)


def _grid(x: _Scale, y: _Scale, plot: Plot) -> Sequence[str]:
    bottom = HEIGHT - BOTTOM
    lines = []
    for value in y.ticks():
        lines.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "grid"))
        lines.append(_text(LEFT - 6, y(value) + 4, _short(value), "end"))
    for value in x.ticks():
        lines.append(_line(x(value), bottom, x(value), bottom + 4, "axis"))
        lines.append(_text(x(value), bottom + 16, _short(value), "middle"))
    lines.append(_line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis"))
    lines.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, plot.x, "middle title"))
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {middle:g})"'
    lines.append(_text(14, middle, plot.y, "middle title", turned))
    return lines


def _series(series: Series, number: int, x: _Scale, y: _Scale) -> str:
    places = [(x(a), y(b)) for a, b in series.points]
    shapes = []
    if series.mark is not Mark.DOTS:
        shapes.append(f'<path d="{_path(places, series.mark)}"/>')
    if series.mark in (Mark.DOTS, Mark.LINE_AND_DOTS):
        radius = 3.5 if series.mark is Mark.LINE_AND_DOTS else 1.8
        shapes += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}"/>' for a, b in places]
    for (a, b), label in zip(places, series.labels, strict=False):
        side = "end" if a > (LEFT + WIDTH) / 2 else ""
        shapes.append(_text(a + (-7 if side else 7), b - 6, label, f"over {side}"))
    return f'<g class="s s{number % COLORS}"><title>{escape(escaped(series.name))}</title>{"".join(shapes)}</g>'


def _path(places: Sequence[Point], mark: Mark) -> str:
    parts = []
    for number, (a, b) in enumerate(places):
        if not number:
            parts.append(f"M{a:.1f} {b:.1f}")
        elif mark is Mark.STEPS:
            parts.append(f"H{a:.1f}V{b:.1f}")
        else:
            parts.append(f"L{a:.1f} {b:.1f}")
    return "".join(parts)


def _band(band: Band, x: _Scale) -> str:
    left, right = x(band.start), x(band.end)
    return (
        f'<rect class="band" x="{left:.1f}" y="{TOP:g}" width="{max(right - left, 1.5):.1f}"'
        f' height="{HEIGHT - BOTTOM - TOP:g}"><title>{escape(escaped(band.label))}</title></rect>'
        + _text(left + 3, TOP + 11, band.label, "note")
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" {more}>{escape(escaped(words))}</text>'


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def cumulative(values: Values, points: int = 200) -> Sequence[Point]:
    """The share, in percent, of values up to each; of many values so many points."""
    if not values.size:
        return []
    shares = np.linspace(0, 100, min(points, values.size + 1))
    return [
        (float(value), float(share))
        for value, share in zip(np.percentile(values, shares), shares, strict=True)
    ]


def histogram(values: Values, edges: Values) -> Sequence[Point]:
    """The share, in percent, of the values in each bin, as steps."""
    counts, _ = np.histogram(values, edges)
    shares = 100 * counts / max(values.size, 1)
    return [
        *((float(at), float(share)) for at, share in zip(edges, shares, strict=False)),
        (float(edges[-1]), 0.0),
    ]


def log_edges(values: Values, bins: int = 40) -> Values:
    """Bins of equal ratio over all values above 0."""
    above = values[values > 0]
    low, high = (float(above.min()), float(above.max())) if above.size else (1.0, 2.0)
    return np.geomspace(low, high * 1.001 if high > low else low * 2, bins + 1)
