"""Metrics of handoffs: plain numbers, converted when Prometheus scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from trtmesh.chassis.metrics import Histogram
from trtmesh.engine.handoff.lease import Outcome
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import kv_transfer_pb2 as pb

TRANSFER_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)  # fmt: skip
"""Seconds of a transfer, as long as the prefill meanwhile."""


class HandoffMetrics:
    """Handoffs of both sides, `sent` and `received`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.transfer = Histogram(
            prefix + "handoff_transfer_seconds",
            "From the first part of a fetch to the end of its last read, on the receiver.",
            TRANSFER_BUCKETS,
        )
        self._load = epb.Load()
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def ended(
        self,
        side: str,
        transport: pb.KvTransport.ValueType | None,
        outcome: Outcome,
        size: int,
        seconds: float | None,
    ) -> None:
        """Counts the outcome of a lease; `transport` is None without a fetch, `seconds` where the backend fetches."""
        name = word_of(transport)
        self._ended[side, name, outcome.value] += 1
        self._bytes[side, name] += size
        if side == "received" and outcome is Outcome.CONSUMED and seconds is not None:
            self.transfer.observe(seconds)

    def told(self, load: epb.Load) -> None:
        """Takes the last load report: scrapes happen on another thread."""
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus on another thread."""
        ended = CounterMetricFamily(
            self._prefix + "handoffs",
            "Leases that ended.",
            labels=["side", "transport", "outcome"],
        )
        for labels, count in list(self._ended.items()):
            ended.add_metric(list(labels), count)
        sizes = CounterMetricFamily(
            self._prefix + "handoff_bytes",
            "Bytes of KV transferred.",
            labels=["side", "transport"],
        )
        for pair, size in list(self._bytes.items()):
            sizes.add_metric(list(pair), size)
        held = GaugeMetricFamily(
            self._prefix + "held_leases", "Leases without an outcome.", labels=["side"]
        )
        load = self._load
        held.add_metric(["sent"], load.sent_handoffs.held)
        held.add_metric(["received"], load.received_handoffs.held)
        yield from (ended, sizes, held, self.transfer.family())
        yield GaugeMetricFamily(
            self._prefix + "quarantined_blocks",
            "KV blocks of ended leases to which a read may still write.",
            value=load.quarantined_blocks,
        )


def word_of(transport: pb.KvTransport.ValueType | None) -> str:
    """The name of a transport in settings and metrics."""
    if transport is None:
        return "none"
    return pb.KvTransport.Name(transport).removeprefix("KV_TRANSPORT_").lower()
