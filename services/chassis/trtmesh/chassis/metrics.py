"""Prometheus metrics: one registry a process, passed in, and its endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from trtmesh.chassis.errors import PortInUse

LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Seconds; fine enough for inter-token latency and wide enough for queue time."""

TOKEN_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)
"""Tokens of a prompt or an output."""


@contextmanager
def metrics_endpoint(
    registry: CollectorRegistry, host: str, port: int | None
) -> Iterator[int | None]:
    """Serves `registry` at /metrics while inside; yields the port, or None where `port` is None."""
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise PortInUse(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
