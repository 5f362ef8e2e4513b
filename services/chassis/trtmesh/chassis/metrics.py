"""The metrics of a process: plain numbers in the rooms that count, and one table that says how a scrape reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Kind: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Seconds; fine enough for inter-token latency and wide enough for queue time."""

TOKEN_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)
"""Tokens of a prompt or an output."""

S = TypeVar("S")


class Histogram:
    """A histogram for the hot path: an observation costs a tenth of prometheus_client's. Not thread-safe."""

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and the number of observations up to each."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """A metric: its kind, name and help, and how it is read from its source: an attribute, by default that of its
    name, or a function. With labels it reads a mapping from their values, a string or a tuple, to numbers or
    histograms."""

    kind: Kind
    name: str
    text: str
    read: str | Callable[[S], Any] = ""
    labels: tuple[str, ...] = ()

    def family(self, prefix: str, source: S, created: float | None = None) -> Metric:
        """The metric in Prometheus' form."""
        read = self.read
        value: Any = read(source) if callable(read) else getattr(source, read or self.name)
        family: Any = self.kind(prefix + self.name, self.text, labels=self.labels)
        # A copy, since the event loop goes on counting.
        for key, each in value.copy().items() if self.labels else [((), value)]:
            labels = [key] if isinstance(key, str) else list(key)
            if isinstance(each, Histogram):
                family.add_metric(labels, each.buckets(), each.sum)
            else:
                family.add_metric(labels, each)
            if created is not None and self.kind is not GAUGE:
                named = dict(zip(self.labels, labels, strict=True))
                family.add_sample(f"{prefix}{self.name}_created", named, created)
        whole: Metric = family
        return whole


def families(
    prefix: str, rows: Sequence[Row[S]], source: S, created: float | None = None
) -> Iterator[Metric]:
    """The metrics of a table, at each scrape; omits histograms that nobody has. Adds the time that the counts began
    where it is given."""
    for row in rows:
        family = row.family(prefix, source, created)
        if family.samples or row.kind is not HISTOGRAM:
            yield family
