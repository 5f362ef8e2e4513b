"""Measures what a burst of requests does to running streams, and how fast it is served.

For 16 and 64 streams at a 10 ms step, in a process of their own: the longest gap of any stream in a quiet second, then
beside 64, 500 and 2,000 one-token requests at once, and beside 500 cancelled requests; and the requests of a burst
served per second. Every request must end with its token, or the run fails.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from _doors import DOORS
from _load import CONNECTIONS, ask, connections
from _options import run_bench, tell
from _stack import stack
from _steady_streams import ENDLESS
from _turns import Figures, Found
from trtmesh.chassis.grpc.client import ClientConnection

STEP_MS = 10
KV_BLOCKS = 2**20
"""Room for endless streams, whose sequences may become as long as the engine admits."""
ENGINE = (
    *("--simulated-timing-step-ms", str(STEP_MS)),
    *("--simulated-kv-cache-total-blocks", str(KV_BLOCKS)),
)
QUIET_SECONDS, AFTER_SECONDS = 1.0, 0.3
CANCELLED = 500


class Gaps:
    """The streams in their process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        assert self._process.stdout
        if not (line := await self._process.stdout.readline()):
            raise SystemExit("the streams ended")
        return line.decode()

    async def worst_ms(self) -> float:
        """The longest gap since the last call."""
        assert self._process.stdin
        self._process.stdin.write(b"\n")
        return float(await self.line())


@asynccontextmanager
async def steady(
    address: str, count: int, door: str = "native", tokens: int = ENDLESS
) -> AsyncIterator[Gaps]:
    """Runs `count` streams until the block ends, or as many of `tokens` tokens one after the other."""
    script = Path(__file__).with_name("_steady_streams.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        address,
        str(count),
        door,
        str(tokens),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        gaps = Gaps(process)
        await gaps.line()
        yield gaps
    finally:
        process.kill()
        await process.wait()


class Bursts:
    """Bursts and cancels beside running streams, over connections that stay open."""

    def __init__(self, connections: list[ClientConnection], gaps: Gaps, door: str) -> None:
        self._connections, self._gaps = connections, gaps
        self._door = DOORS[door]

    async def quiet(self) -> float:
        """The longest gap with nothing beside the streams."""
        await self._gaps.worst_ms()
        await asyncio.sleep(QUIET_SECONDS)
        return await self._gaps.worst_ms()

    async def starts(self, count: int) -> tuple[float, float]:
        """The longest gap beside requests that begin at once, and the requests served per second."""
        await self._gaps.worst_ms()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                connection = self._connections[number % CONNECTIONS]
                request = self._door.request(f"burst {number}", 1)
                group.create_task(ask(connection, self._door, request, 1))
        seconds = time.perf_counter() - began
        gap = await self._gaps.worst_ms()
        await asyncio.sleep(AFTER_SECONDS)
        return gap, count / seconds

    async def cancels(self) -> float:
        """The longest gap beside the cancellation of running requests."""
        calls, door = [], self._door
        for number in range(CANCELLED):
            call = self._connections[number % CONNECTIONS].open(door.method)
            await call.write(door.request(f"cancelled {number}", ENDLESS))
            call.half_close()
            calls.append(call)
        for call in calls:
            while (message := await call.read()) is not None and not door.begins(message):
                pass
        await self._gaps.worst_ms()
        for call in calls:
            call.cancel()
        await asyncio.sleep(AFTER_SECONDS)
        gap = await self._gaps.worst_ms()
        await asyncio.sleep(AFTER_SECONDS)
        return gap


@asynccontextmanager
async def beside(
    address: str, streams: int, door: str, tokens: int = ENDLESS
) -> AsyncIterator[Bursts]:
    """Runs `streams` streams, and connections for bursts beside them, until the block ends."""
    async with (
        steady(address, streams, door, tokens) as gaps,
        connections(address, CONNECTIONS) as opened,
    ):
        yield Bursts(opened, gaps, door)


async def measure(
    address: str,
    streams: int,
    bursts: Sequence[int],
    runs: int,
    door: str = "native",
    tokens: int = ENDLESS,
) -> Figures:
    """Medians of the runs. Streams of `tokens` tokens follow each other; only endless requests are cancelled."""
    found = Found()
    async with beside(address, streams, door, tokens) as disturbance:
        await disturbance.starts(64)
        for _ in range(runs):
            found.note("quiet_gap_ms", await disturbance.quiet())
            for count in bursts:
                gap, rate = await disturbance.starts(count)
                found.note(f"gap_ms_{count}", gap)
                found.note(f"requests_per_second_{count}", rate)
            if tokens == ENDLESS:
                found.note("gap_ms_cancels", await disturbance.cancels())
    figures = found.medians(digits=1)
    tell(f"{streams} streams", figures)
    return figures


async def main(
    *,
    streams: tuple[int, ...] = (16, 64),
    bursts: tuple[int, ...] = (64, 500, 2000),
    runs: int = 5,
) -> Figures:
    results = {}
    for count in streams:
        with stack(*ENGINE) as mesh:
            results[str(count)] = await measure(mesh.address, count, bursts, runs)
    return {"step_ms": STEP_MS, "streams": results}


if __name__ == "__main__":
    run_bench(main)
