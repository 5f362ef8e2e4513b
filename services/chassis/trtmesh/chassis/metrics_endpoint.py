"""The Prometheus endpoint of a process."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from trtmesh.chassis.http_server import HttpLimits, HttpServer
from trtmesh.chassis.tls.certificates import ServerTls

PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = openmetrics.CONTENT_TYPE_LATEST
END = b"# EOF\n"
"""Of a page in OpenMetrics."""

LIMITS = HttpLimits(
    max_open=64, max_per_address=32, held_bytes=2**20, idle_seconds=30.0, unread_seconds=10.0
)
REST = 4
"""Rest after a rendering, in multiples of the rendering time: continuous scrapes take a fifth of a core."""


SLICE_SECONDS = 0.001
"""Time that a rendering computes without a break, or longer for one metric."""


@asynccontextmanager
async def metrics_endpoint(
    registry: CollectorRegistry,
    host: str,
    port: int | None,
    more: Callable[[], str] = str,
    tls: ServerTls | None = None,
) -> AsyncIterator[int | None]:
    """Serves `registry` at /metrics, followed by the text of `more`, which runs in a thread. The format is Prometheus'
    text, or OpenMetrics, which has exemplars, for scrapers that name it. Yields the port, or None if `port` is None.
    Raises StartupError."""
    if port is None:
        yield None
        return
    rendering = _Rendering(partial(_rendered, _Slices(registry), more))
    app = web.Application()
    app.router.add_get("/metrics", rendering.answer)
    server = HttpServer(app, LIMITS, tls)
    _, taken = server.listen(host, port, "serve metrics")
    try:
        await server.open()
        yield taken
    finally:
        await server.close()
        rendering.close()


def _rendered(registry: Collector, more: Callable[[], str], kind: str) -> bytes:
    if kind == PLAIN_TEXT:
        return generate_latest(registry) + more().encode()
    page: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call] # of the library
    return page.removesuffix(END) + _as_open_metrics(more()).encode() + END


def _as_open_metrics(text: str) -> str:
    """Families of Prometheus' text format: a counter without `_total` is of an unknown type, a bound has a point."""
    text = re.sub(r"^(# TYPE \S+) counter$", r"\1 unknown", text, flags=re.MULTILINE)
    return re.sub(r'\ble="(\d+)"', r'le="\1.0"', text)


def _asked(accepted: Iterable[str]) -> str:
    """The format for a scraper with these headers."""
    named = [each.partition(";")[0].strip() for each in ",".join(accepted).split(",")]
    return OPEN_METRICS if OPEN_METRICS.partition(";")[0] in named else PLAIN_TEXT


class _Slices(Collector):
    """Lets go of the interpreter between metrics: the event loop would wait 5 ms for it each time, and the page of a
    router with 1,000 workers takes a tenth of a second."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        began = time.perf_counter()
        for metric in self._registry.collect():
            yield metric
            if time.perf_counter() - began > SLICE_SECONDS:
                time.sleep(0)
                began = time.perf_counter()


class _Rendering:
    """Renders in a thread, once for all waiting scrapes of a format."""

    def __init__(self, render: Callable[[str], bytes]) -> None:
        self._render = render
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._turn = asyncio.Lock()
        self._rested = -math.inf
        self._began = {PLAIN_TEXT: -math.inf, OPEN_METRICS: -math.inf}
        """Start of the last rendering of each format."""
        self._texts: dict[str, bytes] = {}

    async def answer(self, request: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        kind = _asked(request.headers.getall(hdrs.ACCEPT, ()))
        arrived = loop.time()
        async with self._turn:
            # A rendering already begun may lack the latest changes.
            if self._began[kind] <= arrived:
                await asyncio.sleep(self._rested - loop.time())
                began = self._began[kind] = loop.time()
                rendering = loop.run_in_executor(self._thread, self._render, kind)
                self._texts[kind] = await rendering
                self._rested = loop.time() + REST * (loop.time() - began)
            return web.Response(body=self._texts[kind], headers={hdrs.CONTENT_TYPE: kind})

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
