"""A router with a simulated engine, and eight healthy streams on it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc
import psutil
import pytest
import pytest_asyncio
from e2e.mesh import DEMO, PATIENT, SMALL
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import ServiceProcess, service_process

STREAMS = 8
STEP_MS, CALM_STEP_MS = "10", "50"
"""Of the engine where delays are measured, and where they are not."""
SIMULATED = ("--backend", "simulated", "--model", "demo", "--simulated-timing-step-ms")
CONTROL_SECONDS = 0.5
PATIENCE_SECONDS = 120.0
IDLE_SECONDS = 0.5
TABLE_HEAD = """
| attack | connections | worst gap | idle first token | worst first token | memory before | growth |
|---|---|---|---|---|---|---|
""".strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options for command lines with this folder or a file in it."""
    parser.addoption("--attack-seconds", type=float, help="length of each attack")


@dataclass(frozen=True)
class Service:
    """What healthy clients saw for a while, in milliseconds."""

    gap_ms: float
    """The longest gap of a stream."""
    firsts_ms: list[float]
    """Times to the first token of short calls."""

    @property
    def median_first_ms(self) -> float:
        return median(self.firsts_ms)

    def __or__(self, later: Service) -> Service:
        return Service(max(self.gap_ms, later.gap_ms), self.firsts_ms + later.firsts_ms)


@dataclass
class Site:
    """A router under attack."""

    router: ServiceProcess
    healthy: asyncio.subprocess.Process
    rows: dict[tuple[str, int], str] = field(default_factory=dict)
    """Of the table in docs/security.md, by attack and connections: the last try of each."""

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.router.pid)

    async def service(self) -> Service:
        """What healthy clients saw since the last call."""
        assert self.healthy.stdin
        assert self.healthy.stdout
        self.healthy.stdin.write(b"\n")
        line = await self.healthy.stdout.readline()
        assert line, "the healthy streams ended"
        return Service(**json.loads(line))

    async def quiet_service(self) -> Service:
        """What they see without an attack."""
        await self.service()
        await asyncio.sleep(CONTROL_SECONDS)
        return await self.service()

    async def cpu_share(self) -> float:
        """The router's share of a core."""
        before, began = _cpu_seconds(self.process), time.monotonic()
        await asyncio.sleep(IDLE_SECONDS)
        return (_cpu_seconds(self.process) - before) / (time.monotonic() - began)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def until_serving(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(PATIENCE_SECONDS):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for told in watch:
            if told.status == health_pb2.HealthCheckResponse.SERVING:
                return


@asynccontextmanager
async def _healthy_streams(
    address: str, streams: int, least_tokens: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    script = Path(__file__).with_name("healthy_streams.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        address,
        str(streams),
        str(least_tokens),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def _served(
    engine_flags: Sequence[str], least_tokens: int, streams: int = STREAMS
) -> AsyncIterator[Site]:
    free = ("--port", "0")
    async with (
        service_process("tokenizer", *free, "--model-dir", str(DEMO)) as tokenizer,
        service_process("engine", *free, *engine_flags) as engine,
        service_process(
            *("router", *free, *PATIENT),
            *("--engines", engine.address, "--tokenizers", tokenizer.address),
        ) as router,
    ):
        await until_serving(router.address)
        async with _healthy_streams(router.address, streams, least_tokens) as healthy:
            site = Site(router, healthy)
            yield site
            if site.rows:
                print("", TABLE_HEAD, *site.rows.values(), sep="\n")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with _served((*SIMULATED, STEP_MS), 30_000) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unmeasured_site() -> AsyncIterator[Site]:
    """With slower streams."""
    async with _served((*SIMULATED, CALM_STEP_MS), 30_000) as site:
        yield site


GUIDED = (*SMALL, "--torch-threads", "1")
"""Flags of an engine that follows guides."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guided_site() -> AsyncIterator[Site]:
    async with _served(GUIDED, 1_000) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unmeasured_guided_site() -> AsyncIterator[Site]:
    """With fewer streams."""
    async with _served(GUIDED, 1_000, streams=2) as site:
        yield site
