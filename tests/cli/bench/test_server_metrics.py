"""Metrics of a server, read during a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from cli.bench.runs import HEADER, answer
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench import measuring, server_metrics
from trtmesh.tools.bench.driver import Driver
from trtmesh.tools.bench.figures import report_of
from trtmesh.tools.bench.measuring import Setup, Watch, measure
from trtmesh.tools.bench.options import ClientOptions
from trtmesh.tools.bench.record import Load, MetricsSample, Run
from trtmesh.tools.bench.reports.page import as_html, server_plots
from trtmesh.tools.bench.server_metrics import ServerMetrics, parsed
from trtmesh.tools.bench.targets.target import Connecting, Url

TEXT = b"""\
# TYPE own_tokens counter
own_tokens_total{worker="a"} 3
own_tokens_total{worker="b"} 4
# TYPE own_queue gauge
own_queue{worker="a"} 2
own_queue{worker="b"} NaN
# TYPE own_wait_seconds histogram
own_wait_seconds_bucket{le="1"} 5
own_wait_seconds_bucket{le="+Inf"} 6
own_wait_seconds_sum 2.5
own_wait_seconds_count 6
# TYPE own_age_seconds summary
own_age_seconds{quantile="0.5"} 7
own_age_seconds_sum 8
own_age_seconds_count 9
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow moment of the machine fails no reading."""
    monkeypatch.setattr(server_metrics, "READ_SECONDS", 60.0)


@asynccontextmanager
async def serving(*answers: web.Response) -> AsyncIterator[tuple[str, asyncio.Semaphore]]:
    """Serves these in turn, the last one again; the semaphore counts the requests."""
    asked, number = asyncio.Semaphore(0), count()

    async def metrics(_: web.Request) -> web.Response:
        asked.release()
        own = answers[min(next(number), len(answers) - 1)]
        return web.Response(status=own.status, body=own.body)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/metrics", asked
    finally:
        await runner.cleanup()


def test_metrics_are_summed_over_their_labels() -> None:
    seen = parsed("here", 1.5, TEXT.decode())

    assert seen == MetricsSample(
        1.5,
        "here",
        {"own_queue": 2.0},
        {
            "own_tokens_total": 7.0,
            "own_wait_seconds_sum": 2.5,
            "own_wait_seconds_count": 6.0,
            "own_age_seconds_sum": 8.0,
            "own_age_seconds_count": 9.0,
        },
    )


async def test_a_server_is_read_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "PERIOD_SECONDS", 0.01)
    times = count(1.0)
    broken, empty = web.Response(status=500), web.Response(body=b"<html>")
    async with serving(web.Response(body=TEXT), broken, empty, web.Response(body=TEXT)) as (
        url,
        asked,
    ):
        metrics = ServerMetrics(url)
        task = asyncio.create_task(metrics.run(lambda: next(times)))
        for _ in range(5):
            await asked.acquire()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    first, second, *_ = metrics.samples()
    assert (first.at_s, first.counters["own_tokens_total"]) == (1.0, 7.0)
    assert first.source == url
    # The page of the third reading took the second time.
    assert second.at_s == 3.0
    assert metrics.problems[0] == "HTTP 500"
    assert len(metrics.problems) == 2


async def test_a_run_shorter_than_a_reading_has_one() -> None:
    async with serving(web.Response(body=TEXT)) as (url, _):
        metrics = ServerMetrics(url)
        task = asyncio.create_task(metrics.run(lambda: 1.0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    (only,) = metrics.samples()
    assert only.counters["own_tokens_total"] == 7.0
    assert metrics.problems == []


async def test_the_last_reading_is_outside_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no part in the client's time, and no fault strikes while it waits for its answer."""
    ends: list[str] = []

    class Companion:
        """What happens beside a run."""

        made = ()

        def __init__(self, name: str) -> None:
            self._name = name

        async def run(self, _: Callable[[], float]) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ends.append(self._name)

        def samples(self) -> Sequence[MetricsSample]:
            return ()

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Sequence[Any]]:
        yield [SimpleNamespace(release="")]

    def busy(_: Driver) -> float:
        ends.append("client")
        return 0.5

    monkeypatch.setattr(measuring, "opened", opened)
    monkeypatch.setattr(Driver, "busy", busy)
    faults, metrics = Companion("faults"), Companion("metrics")
    watch: Any = Watch
    beside = watch(disruptor=faults, metrics=metrics)
    connecting = Connecting(Url.parse("grpc://127.0.0.1:1"))
    setup = Setup(connecting, "nothing", ClientOptions(echo=False))

    # Both companions begin meanwhile.
    monkeypatch.setattr(Driver, "send", lambda _: asyncio.sleep(0.01))
    run = await measure(setup, Load("closed", concurrency=1), [], beside)

    assert run.end
    assert run.end.client_busy == 0.5
    assert ends == ["client", "faults", "metrics"]


async def test_readings_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(server_metrics, "MOST_HELD_BYTES", len(TEXT))
    async with serving(web.Response(body=TEXT)) as (url, _):
        metrics = ServerMetrics(url)
        task = asyncio.create_task(metrics.run(lambda: 1.0))
        async with asyncio.timeout(30):
            while not metrics.problems:  # noqa: ASYNC110 - no event tells of a problem
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert len([*metrics.samples()]) == 2
    assert {*metrics.problems} == {"a run keeps no more than 0 MiB of readings"}


@pytest.mark.parametrize(
    ("answer_of_server", "why"),
    [
        (web.Response(status=404), "HTTP 404"),
        (web.Response(body=b""), "no metrics"),
        (web.Response(body=b"own{ 1"), "metrics"),
        (web.Response(body=b"\xff"), "utf-8"),
        (web.Response(body=b"# " + b"x" * (9 << 20)), "more than 8 MiB"),
        (web.Response(body=b"\n".join(b"own%d 1" % n for n in range(2001))), "more than 2000"),
    ],
    ids=["absent", "empty", "broken", "binary", "endless", "many"],
)
async def test_what_has_no_metrics_is_refused(answer_of_server: web.Response, why: str) -> None:
    async with serving(answer_of_server) as (url, _):
        with pytest.raises(SettingsError, match=why) as refused:
            await ServerMetrics(url).check()
    assert str(refused.value).startswith(f"--metrics {url}: ")


async def test_a_url_that_nobody_serves_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--metrics http://127\.0\.0\.1:1/"):
        await ServerMetrics("http://127.0.0.1:1/").check()


def test_the_page_has_what_changed() -> None:
    def sample(at_s: float, tokens: float, queue: float, waited: float) -> MetricsSample:
        counters = {"tokens_total": tokens, "still_total": 3.0}
        waits = {"wait_seconds_sum": waited, "wait_seconds_count": at_s}
        return MetricsSample(
            at_s, "http://own/metrics", {"queue": queue, "still": 1.0}, counters | waits
        )

    # The server began anew between the last two.
    samples = (sample(1, 10, 5, 1), sample(3, 30, 6, 2), sample(4, 50, 7, 5), sample(5, 4, 7, 6))
    run = Run(HEADER, (answer(0, (1.0, 5.0)),), samples=samples)

    report = report_of([run])
    plots = {each.title: [*each.series[0].points] for each in server_plots(report.runs[0])}

    assert plots == {
        "queue": [(1, 5.0), (3, 6.0), (4, 7.0), (5, 7.0)],
        "tokens_total, per second": [(3, 10.0), (4, 20.0), (5, 4.0)],
        "wait_seconds, mean": [(3, 0.5), (4, 3.0), (5, 1.0)],
    }
    page = as_html(report).decode()
    assert "tokens_total, per second" in page
    assert "http://own/metrics" in page
    bare = as_html(report_of([replace(run, samples=())])).decode()
    assert "metrics that changed" not in bare
