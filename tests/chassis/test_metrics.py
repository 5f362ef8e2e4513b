"""The metrics endpoint and the cheap histogram."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter
from trtmesh.chassis.errors import PortInUse
from trtmesh.chassis.metrics import Histogram, metrics_endpoint


def test_endpoint_serves_the_registry() -> None:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    with (
        metrics_endpoint(registry, "127.0.0.1", 0) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response,
    ):
        assert "things_total 3.0" in response.read().decode()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_additional_metrics_follow_the_registry() -> None:
    """Both parts are plain text, whatever format the scraper accepts."""
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    wishes = {"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"}
    with metrics_endpoint(registry, "127.0.0.1", 0, lambda: "own 7\n") as port:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=wishes)
        with urllib.request.urlopen(request, timeout=10) as response:
            lines = response.read().decode().splitlines()
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "things_total 3.0" in lines
    assert lines[-1] == "own 7"


def test_endpoint_without_a_port_is_off() -> None:
    with metrics_endpoint(CollectorRegistry(), "127.0.0.1", None) as port:
        assert port is None


def test_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(PortInUse, match=f"cannot serve metrics on 127.0.0.1:{port}"),
            metrics_endpoint(CollectorRegistry(), "127.0.0.1", port),
        ):
            pass


def test_histogram_counts_equal_values_at_once() -> None:
    histogram = Histogram("h", "H.", bounds=(1.0, 2.0))
    histogram.observe(1.0, times=3)
    histogram.observe(1.5)
    histogram.observe(9.0)
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in histogram.family().samples
    }
    assert samples["h_bucket", "1.0"] == 3
    assert samples["h_bucket", "2.0"] == 4
    assert samples["h_bucket", "+Inf"] == samples["h_count", None] == 5
    assert samples["h_sum", None] == 13.5
