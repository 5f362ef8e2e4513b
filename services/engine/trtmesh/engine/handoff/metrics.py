"""Metrics of handoffs."""

from __future__ import annotations

from collections import Counter

from trtmesh.chassis.metrics import COUNTER, GAUGE, HISTOGRAM, Histogram, Label, Row
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

    def __init__(self) -> None:
        self.transfer = Histogram(TRANSFER_BUCKETS)
        self.handoffs: Counter[tuple[str, str, str]] = Counter()
        self.handoff_bytes: Counter[tuple[str, str]] = Counter()
        self._load = epb.Load()

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
        self.handoffs[side, name, outcome.value] += 1
        self.handoff_bytes[side, name] += size
        if side == "received" and outcome is Outcome.CONSUMED and seconds is not None:
            self.transfer.observe(seconds)

    def told(self, load: epb.Load) -> None:
        """Takes the last load report: scrapes happen on another thread."""
        self._load = load

    @property
    def held_leases(self) -> dict[str, int]:
        load = self._load
        return {"sent": load.sent_handoffs.held, "received": load.received_handoffs.held}

    @property
    def leases(self) -> dict[tuple[str, str], int]:
        """Of one report, so that granted leases are the held and the ended ones."""
        load = self._load
        return {
            (side, event): getattr(counts, event)
            for side, counts in (("sent", load.sent_handoffs), ("received", load.received_handoffs))
            for event in ("granted", *(outcome.value for outcome in Outcome))
        }

    @property
    def quarantined_blocks(self) -> int:
        return self._load.quarantined_blocks


SIDE = Label("side", "`sent`, `received`")
TRANSPORT = Label("transport", "transports of `engine.handoff`, `none` without a fetch")
OUTCOME = Label("outcome", "`consumed`, `released`, `expired`")

# fmt: off
HANDOFF_TABLE: tuple[Row[HandoffMetrics], ...] = (
    Row(COUNTER, "handoffs", "Leases that ended.", labels=(SIDE, TRANSPORT, OUTCOME)),
    Row(COUNTER, "handoff_bytes", "Bytes of KV transferred.", labels=(SIDE, TRANSPORT)),
    Row(COUNTER, "leases", "Leases granted, and those that ended by outcome; the others are held.",
        labels=(SIDE, Label("event", "`granted`, `consumed`, `released`, `expired`"))),
    Row(GAUGE, "held_leases", "Leases without an outcome.", labels=(SIDE,)),
    Row(HISTOGRAM, "handoff_transfer_seconds",
        "Seconds from the first part of a fetch to the end of its last read, on the receiver.", "transfer"),
    Row(GAUGE, "quarantined_blocks", "KV blocks of ended leases to which a read may still write."),
)
# fmt: on


def word_of(transport: pb.KvTransport.ValueType | None) -> str:
    """The name of a transport in settings and metrics."""
    if transport is None:
        return "none"
    return pb.KvTransport.Name(transport).removeprefix("KV_TRANSPORT_").lower()
