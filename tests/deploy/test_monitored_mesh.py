"""Dashboards and alerts over a mesh that a real Prometheus scrapes."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from deploy.images import ROOT
from deploy.monitored_mesh import Prometheus, monitored_mesh
from deploy.monitoring_files import PROMETHEUS, alerts, choices, queries
from e2e.mesh import eventually

pytestmark = [PROMETHEUS.needed, pytest.mark.slow]

INTERVAL = "10s"
PICTURES = ROOT / "docs" / "pictures" / "dashboards.py"
DRAWN_SECONDS = 100


def compared(expression: Any) -> Iterator[str]:
    """What an alert's expression compares with a bound, or looks for."""
    if isinstance(expression, promql_parser.BinaryExpr):
        if str(expression.op) in ("and", "or", "unless"):
            yield from compared(expression.lhs)
            yield from compared(expression.rhs)
        else:
            assert str(expression.op) in ("<", ">", "=="), expression
            yield str(expression.lhs)
    elif isinstance(expression, promql_parser.Call) and expression.func.name == "absent":
        yield from map(str, expression.args)
    else:
        yield str(expression)


async def has_data(prometheus: Prometheus, expression: str, seconds: float) -> bool:
    """Whether an expression has had a number in the last seconds."""
    found = await prometheus.values(expression, seconds)
    return any(math.isfinite(float(value)) for series in found for _, value in series["values"])


async def test_every_query_returns_data(tmp_path: Path) -> None:
    asked = {
        f"{query.board}: {query.panel}: {query.legend}": query.filled(choices(), INTERVAL)
        for query in queries()
    }
    for alert in alerts():
        for number, left in enumerate(compared(promql_parser.parse(alert["expr"]))):
            asked[f"{alert['alert']} {number}"] = left
    missing = dict(asked)
    began = time.monotonic()
    async with monitored_mesh(tmp_path) as (_, prometheus):

        async def none_missing() -> bool:
            # One without data is enough to ask again.
            while missing:
                name, expression = next(iter(missing.items()))
                if not await has_data(prometheus, expression, time.monotonic() - began):
                    return False
                del missing[name]
            return True

        try:
            await eventually(none_missing)
        except TimeoutError:
            pytest.fail(f"without data: {missing}")

        async def certificate_fires() -> bool:
            firing = 'ALERTS{alertname="TrtmeshCertificateEnds",alertstate="firing"}'
            return bool((await prometheus.ask("query", query=firing))["result"])

        await eventually(certificate_fires)
        if os.environ.get("PICTURES"):
            await asyncio.sleep(max(0.0, DRAWN_SECONDS + began - time.monotonic()))
            command = [sys.executable, str(PICTURES), prometheus.url, str(DRAWN_SECONDS)]
            drawing = await asyncio.create_subprocess_exec(*command)
            assert await drawing.wait() == 0
