"""The metrics endpoint: what it serves, and what its clients cannot do to the process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.registry import Collector
from trtmesh.chassis.errors import PortInUse
from trtmesh.chassis.metrics import HISTOGRAM, Histogram, Row, families
from trtmesh.chassis.metrics_endpoint import (
    LIMITS,
    OPEN_METRICS,
    PLAIN_TEXT,
    REST,
    metrics_endpoint,
)


def counting() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    return registry


def url(port: int | None) -> str:
    return f"http://127.0.0.1:{port}/metrics"


async def scraped(port: int | None) -> list[str]:
    async with aiohttp.ClientSession() as session, session.get(url(port)) as response:
        assert response.status == 200
        return (await response.text()).splitlines()


async def test_endpoint_serves_the_registry() -> None:
    async with metrics_endpoint(counting(), "127.0.0.1", 0) as port:
        assert "things_total 3.0" in await scraped(port)
    with pytest.raises(aiohttp.ClientConnectorError):
        await scraped(port)


MORE = """\
# TYPE own counter
own{name="le=\\"1\\""} 7
# TYPE sizes histogram
sizes_bucket{le="10"} 1
sizes_bucket{le="+Inf"} 2
sizes_count 2
sizes_sum 30
"""


class Traced(Collector):
    """A histogram with a sampled observation."""

    def __init__(self) -> None:
        self.waits_seconds = Histogram((1.0,))
        self.waits_seconds.observe(0.5, trace_id="c" * 32)

    def collect(self) -> Iterator[Metric]:
        yield from families("own_", (Row(HISTOGRAM, "waits_seconds", "Waits."),), self)


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("*/*", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2", True),
        ("application/openmetrics-text;version=x", True),
    ],
)
async def test_additional_metrics_follow_the_registry(accept: str, is_open: bool) -> None:
    """In the format of the scraper; exemplars are for those that name OpenMetrics."""
    registry = counting()
    registry.register(Traced())
    async with (
        metrics_endpoint(registry, "127.0.0.1", 0, lambda: MORE) as port,
        aiohttp.ClientSession(headers={"Accept": accept, "Accept-Encoding": "gzip"}) as session,
        session.get(url(port)) as response,
    ):
        page = await response.text()
        assert response.headers["Content-Type"].startswith(OPEN_METRICS if is_open else PLAIN_TEXT)
    assert "\nthings_total 3.0\n" in page
    assert (f'# {{trace_id="{"c" * 32}"}} 0.5' in page) == is_open
    if not is_open:
        assert page.endswith(MORE)
        return
    families_of = open_families(page)  # type: ignore[no-untyped-call] # of the library
    samples = [each for family in families_of for each in family.samples]
    assert {(each.name, each.labels.get("le")) for each in samples} >= {
        ("own", None),
        ("sizes_bucket", "10.0"),
        ("own_waits_seconds_bucket", "1.0"),
    }
    assert 'own{name="le=\\"1\\""} 7' in page


async def test_formats_do_not_mix() -> None:
    async with metrics_endpoint(counting(), "127.0.0.1", 0) as port:
        pages = []
        for accept in ("text/plain", "application/openmetrics-text") * 2:
            async with (
                aiohttp.ClientSession(headers={"Accept": accept}) as session,
                session.get(url(port)) as response,
            ):
                pages.append((await response.text()).endswith("# EOF\n"))
    assert pages == [False, True] * 2


async def test_endpoint_without_a_port_is_off() -> None:
    async with metrics_endpoint(CollectorRegistry(), "127.0.0.1", None) as port:
        assert port is None


async def test_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            async with metrics_endpoint(CollectorRegistry(), "127.0.0.1", port):
                pass


async def test_loop_runs_while_a_scrape_is_rendered() -> None:
    held = threading.Event()

    def text() -> str:
        held.wait(timeout=60)
        return "own 7\n"

    async with metrics_endpoint(counting(), "127.0.0.1", 0, text) as port:
        scrape = asyncio.create_task(scraped(port))
        # A rendering on the loop would never let this line be reached.
        await asyncio.sleep(0.05)
        held.set()
        assert "own 7" in await scrape


async def test_many_scrapes_share_a_rendering_and_leave_time_between() -> None:
    clock = asyncio.get_running_loop().time
    spans: list[tuple[float, float]] = []

    def text() -> str:
        began = clock()
        threading.Event().wait(0.02)
        spans.append((began, clock()))
        return "own 7\n"

    async with metrics_endpoint(counting(), "127.0.0.1", 0, text) as port:
        await asyncio.gather(*(scraped(port) for _ in range(LIMITS.max_per_address)))
        alone = len(spans)
        await scraped(port)
    assert alone < LIMITS.max_per_address
    assert len(spans) == alone + 1, "a scrape shows what happened before it"
    for (began, ended), (next_began, _) in pairwise(spans):
        assert next_began - ended >= REST * (ended - began)


async def test_idle_connections_give_way_and_cost_no_thread() -> None:
    threads = threading.active_count()
    async with metrics_endpoint(counting(), "127.0.0.1", 0) as port:
        await scraped(port)
        idle = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(LIMITS.max_per_address)
        ]
        try:
            assert "things_total 3.0" in await scraped(port)
            async with asyncio.timeout(60):
                with suppress(ConnectionResetError):
                    assert await idle[0][0].read() == b""
            assert threading.active_count() <= threads + 1, "of the rendering"
        finally:
            for _, writer in idle:
                writer.close()
