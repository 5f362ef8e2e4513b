"""The metrics of a process: plain numbers in the rooms that count, and one table that says how a scrape reads them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Exemplar
from trtmesh.chassis.quoting import cut, escaped

Kind: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
KINDS: Mapping[Kind, str] = {COUNTER: "counter", GAUGE: "gauge", HISTOGRAM: "histogram"}

OTHER = "other"
"""The value of a label for everything beyond its bound."""

LONGEST_NAME = 128
"""Characters of a label's value."""

LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Seconds; fine enough for inter-token latency and wide enough for queue time."""

TOKEN_BUCKETS = (1.0, 8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0)
"""Tokens of a prompt or an output."""

S = TypeVar("S")


class BoundedNames(dict[str, str]):
    """The label's value for each name: the first `most` names, cut and printable, and `other` for all later ones. A
    dict, as a known name then costs no call."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, name: str) -> str:
        """The value for a name that came first, or too late."""
        if len(self) >= self._most:
            return OTHER
        known = self[name] = escaped(cut(name, LONGEST_NAME))
        return known


class Histogram:
    """A histogram for the hot path: an observation costs a tenth of prometheus_client's. Not thread-safe."""

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        self.sum = 0.0

    def observe(self, value: float, times: int = 1, trace_id: str = "") -> None:
        """Counts `value`, `times` times; `trace_id` names the trace of a sampled item, in 32 hexadecimal digits."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += times
        self.sum += value * times
        if trace_id:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and the number of observations up to each."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))

    def exemplars(self) -> list[tuple[str, float, Exemplar | None]]:
        """The buckets, each with the last observation of a sampled item in it."""
        known = self._exemplars.copy()
        return [(*bucket, known.get(place)) for place, bucket in enumerate(self.buckets())]


@dataclass(frozen=True, slots=True)
class Label:
    """A label, and which values it has: their bound belongs to the contract."""

    name: str
    values: str


UNITS = {"seconds": "seconds", "bytes": "bytes", "us": "microseconds"}


@dataclass(frozen=True, slots=True)
class Described:
    """A metric as its page and other tools describe it."""

    name: str
    """As on the page: a counter's ends in `_total`, unless it is Triton's."""
    kind: str
    """`counter`, `gauge` or `histogram`."""
    text: str
    labels: tuple[Label, ...] = ()
    since: str = "0.1"
    """First version with it."""
    former: str = ""
    """The name that it had in the last minor version and keeps in this one, or ''."""

    @property
    def unit(self) -> str:
        """The unit at the end of the name; '' for a number of what the text says."""
        return UNITS.get(self.name.removesuffix("_total").rpartition("_")[2], "")


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """A metric: its kind, name and help, and how it is read from its source: an attribute, by default that of its
    name, or a function. With labels it reads a mapping from their values, a string or a tuple, to numbers or
    histograms."""

    kind: Kind
    name: str
    text: str
    read: str | Callable[[S], Any] = ""
    labels: tuple[Label, ...] = ()
    since: str = "0.1"
    former: str = ""
    """The name of the last minor version, under which this one exports it too."""

    def families(self, prefix: str, source: S, created: float | None = None) -> Iterator[Metric]:
        """The metric in Prometheus' form, under each of its names."""
        read = self.read
        value: Any = read(source) if callable(read) else getattr(source, read or self.name)
        for name in filter(None, (self.name, self.former)):
            yield self._family(prefix + name, value, created)

    def _family(self, name: str, value: Any, created: float | None) -> Metric:
        names = [label.name for label in self.labels]
        family: Any = self.kind(name, self.text, labels=names)
        # A copy, since the event loop goes on counting.
        for key, each in value.copy().items() if names else [((), value)]:
            labels = [key] if isinstance(key, str) else list(key)
            if isinstance(each, Histogram):
                family.add_metric(labels, each.exemplars(), each.sum)
            else:
                family.add_metric(labels, each)
            if created is not None and self.kind is not GAUGE:
                named = dict(zip(names, labels, strict=True))
                family.add_sample(f"{name}_created", named, created)
        whole: Metric = family
        return whole


def families(
    prefix: str, rows: Sequence[Row[S]], source: S, created: float | None = None
) -> Iterator[Metric]:
    """The metrics of a table, at each scrape; omits histograms that nobody has. Adds the time that the counts began
    where it is given."""
    for row in rows:
        for family in row.families(prefix, source, created):
            if family.samples or row.kind is not HISTOGRAM:
                yield family


def described(prefix: str, rows: Iterable[Row[Any]]) -> Iterator[Described]:
    """The metrics of a table, as their page describes them."""
    for row in rows:
        end = "_total" * (row.kind is COUNTER)
        former = row.former and f"{prefix}{row.former}{end}"
        kind = KINDS[row.kind]
        yield Described(f"{prefix}{row.name}{end}", kind, row.text, row.labels, row.since, former)
