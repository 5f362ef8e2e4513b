"""What became of the spans of a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import COUNTER, Label, Row, families

PREFIX = "trtmesh_"


class SpanCounts(Collector):
    """Counts of spans, each written by one thread."""

    def __init__(self) -> None:
        self.exported_spans = 0
        self.dropped_spans = Counter[str]()

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus on another thread."""
        yield from families(PREFIX, TABLE, self)


TABLE: tuple[Row[SpanCounts], ...] = (
    Row(COUNTER, "exported_spans", "Spans that a collector took; of a process that traces."),
    Row(COUNTER, "dropped_spans", "Spans lost; of a process that traces.",
        labels=(Label("reason", "`queue`: too many waited; `export`: the collector did not take them"),)),
)  # fmt: skip
