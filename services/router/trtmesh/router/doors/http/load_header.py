"""The load of the mesh in the head of an answer, for balancers that ask for it (ORCA)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

import orjson
from aiohttp import web

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"

FRESH_SECONDS = 0.1
"""Least time between two looks at the load, which pass all workers and all live items."""


class LoadHeader:
    """Adds the load to answers of requests that ask for it as text or JSON; other formats of ORCA have none."""

    def __init__(self, load: Callable[[], Mapping[str, float]]) -> None:
        """`load` returns figures by name."""
        self._load = load
        self._seen: Mapping[str, float] = {}
        self._fresh_until = -math.inf

    async def tell(self, request: web.Request, response: web.StreamResponse) -> None:
        """The `on_response_prepare` of an application."""
        kind = request.headers.get(ASKED, "").upper()
        if kind not in ("TEXT", "JSON"):
            return
        now = asyncio.get_running_loop().time()
        if now > self._fresh_until:
            self._seen, self._fresh_until = self._load(), now + FRESH_SECONDS
        if kind == "JSON":
            told = orjson.dumps({"named_metrics": self._seen}).decode()
        else:
            told = ", ".join(f"named_metrics.{name}={value}" for name, value in self._seen.items())
        response.headers[TOLD] = f"{kind} {told}"
