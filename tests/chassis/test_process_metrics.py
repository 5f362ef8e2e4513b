"""The metrics that every process has."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version

import pytest
from prometheus_client import CollectorRegistry
from trtmesh.chassis import process_metrics
from trtmesh.chassis.process_metrics import ProcessMetrics
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.chassis.tls.certificates import Certificates
from trtmesh.chassis.tls.settings import TlsSettings


async def test_a_blocked_loop_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_metrics, "LAG_SECONDS", 0.01)
    metrics = ProcessMetrics("router", Certificates(TlsSettings(), "router"))
    registry = CollectorRegistry()
    registry.register(metrics)
    labels = {
        "service": "router",
        "version": version("trtmesh"),
        "schema_revision": str(SCHEMA_REVISION),
    }
    assert registry.get_sample_value("trtmesh_build_info", labels) == 1
    assert registry.get_sample_value("trtmesh_tasks") == 1
    following = asyncio.create_task(metrics.follow())
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - the loop is to be blocked
    while not registry.get_sample_value("trtmesh_loop_lag_seconds_count"):  # noqa: ASYNC110 - metrics set no event
        await asyncio.sleep(0)
    following.cancel()
    # The rest is how late the look itself came.
    assert metrics.loop_lag.sum >= 0.2 - 0.01
