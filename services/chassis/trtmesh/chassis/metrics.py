"""Prometheus metrics: the endpoint of a process, and a fast histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import HistogramMetricFamily
from trtmesh.chassis.addresses import why_not_bound

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Seconds; fine enough for inter-token latency and wide enough for queue time."""

TOKEN_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)
"""Tokens of a prompt or an output."""


@contextmanager
def metrics_endpoint(
    registry: CollectorRegistry, host: str, port: int | None, more: Callable[[], str] = str
) -> Iterator[int | None]:
    """Serves `registry` at /metrics, followed by the text of `more`, which runs in the endpoint's thread. Yields the
    port, or None if `port` is None."""
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise why_not_bound("serve metrics", host, port) from error
    app = server.get_app()
    assert app is not None
    server.set_app(_with_more(app, more))
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _with_more(app: WSGIApplication, more: Callable[[], str]) -> WSGIApplication:
    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        text = more().encode()
        # The second part is appended as plain text, so the first must not be compressed or in another format.
        plain = {"HTTP_ACCEPT": "text/plain", "HTTP_ACCEPT_ENCODING": "identity"}
        return [*app({**environ, **plain}, start_response), text]

    return serve


class Histogram:
    """A histogram for the hot path: an observation costs a tenth of prometheus_client's. Not thread-safe."""

    def __init__(self, name: str, text: str, bounds: Sequence[float] = LATENCY_BUCKETS) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> HistogramMetricFamily:
        """The histogram in Prometheus' form, built for each scrape."""
        bounds = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
