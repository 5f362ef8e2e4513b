"""The Prometheus endpoint of a process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, generate_latest
from trtmesh.chassis.http_server import HttpLimits, HttpServer
from trtmesh.chassis.tls.certificates import ServerTls

PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"
LIMITS = HttpLimits(
    max_open=64, max_per_address=32, held_bytes=2**20, idle_seconds=30.0, unread_seconds=10.0
)
REST = 4
"""Rest after a rendering, in multiples of the rendering time: continuous scrapes take a fifth of a core."""


@asynccontextmanager
async def metrics_endpoint(
    registry: CollectorRegistry,
    host: str,
    port: int | None,
    more: Callable[[], str] = str,
    tls: ServerTls | None = None,
) -> AsyncIterator[int | None]:
    """Serves `registry` at /metrics, followed by the text of `more`, which runs in a thread. Yields the port, or None
    if `port` is None. Raises StartupError."""
    if port is None:
        yield None
        return
    rendering = _Rendering(lambda: generate_latest(registry) + more().encode())
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


class _Rendering:
    """Renders in a thread, once for all waiting scrapes."""

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._turn = asyncio.Lock()
        self._began = self._rested = -math.inf
        self._text = b""

    async def answer(self, _: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        async with self._turn:
            # A rendering already begun may lack the latest changes.
            if self._began <= arrived:
                await asyncio.sleep(self._rested - loop.time())
                self._began = loop.time()
                self._text = await loop.run_in_executor(self._thread, self._render)
                self._rested = loop.time() + REST * (loop.time() - self._began)
            return web.Response(body=self._text, headers={hdrs.CONTENT_TYPE: PLAIN_TEXT})

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
