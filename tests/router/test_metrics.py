"""A router's metrics can be scraped after any message of a peer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from trtmesh.router.metrics import RouterMetrics
from trtmesh.v1 import generation_pb2 as pb


def test_unknown_reasons_are_counted_together() -> None:
    metrics, registry = RouterMetrics(), CollectorRegistry()
    registry.register(metrics)
    for reason in (pb.FINISH_REASON_LENGTH, 98, 99):
        metrics.finished[reason] += 1

    def finished(reason: str) -> float | None:
        return registry.get_sample_value("trtmesh_router_items_finished_total", {"reason": reason})

    assert (finished("length"), finished("unknown")) == (1, 2)
