"""What the client itself costs: the protocol and the concurrency of a run, against a server that does nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from statistics import quantiles

from trtmesh.chassis.errors import StartupError
from trtmesh.tools.bench.driver import Job, answers_of
from trtmesh.tools.bench.record import Answer, Echo, Plan, Prompt, Run
from trtmesh.tools.bench.targets.opening import opened
from trtmesh.tools.bench.targets.target import Connecting, Target, Url

CHUNKS, GAP_MS = 64, 10
"""Of an answer while latencies are measured; for the ceiling it comes without gaps."""
FEWEST_PACED, FEWEST_FLAT = 4, 32
"""Requests, also for fewer at a time."""
MOST_AT_ONCE = 1024
BUSIEST = 0.9
"""Share of a run's time that the client may compute; beyond it figures are the client's."""


class ClientTooSlow(StartupError):
    """The figures of a run would be those of the client."""


async def echo(protocol: str, concurrency: int) -> Echo:
    """Takes about a second: latencies of a steady stream, then the ceiling by the CPU time of this thread."""
    at_once = min(concurrency, MOST_AT_ONCE)
    async with _echo_server(protocol) as url, opened(Connecting(url, model="echo"), 1) as targets:
        await _ask(targets, 1, at_once, 1, 0)
        paced = await _ask(targets, CHUNKS, at_once, max(FEWEST_PACED, at_once), GAP_MS)
        began = time.thread_time()
        flat = await _ask(targets, CHUNKS, at_once, max(FEWEST_FLAT, at_once), 0)
        spent = time.thread_time() - began
    return Echo(
        concurrency=at_once,
        added_first_ms=_percentiles([_late_ms(answer)[0] for answer in paced]),
        added_gap_ms=_percentiles([ms for answer in paced for ms in _added_gaps_ms(answer)]),
        tokens_per_s=sum(len(answer.arrivals_s) for answer in flat) / spent,
    )


def check_client(run: Run) -> None:
    """Raises ClientTooSlow if the client was too busy for its figures to be those of the server."""
    if run.end is None or run.end.client_busy <= BUSIEST:
        return
    echo = run.header.echo
    ceiling = f" Its ceiling is about {echo.tokens_per_s:,.0f} chunks/s." if echo else ""
    raise ClientTooSlow(
        f"under {run.header.load} the client itself computed {run.end.client_busy:.0%} of the time, so its figures"
        f" are not those of the server.{ceiling} Use more --processes or a lower load; --no-echo reports all the same"
    )


async def _ask(
    targets: Sequence[Target], chunks: int, at_once: int, requests: int, gap_ms: int
) -> Sequence[Answer]:
    prompt = f"{chunks} {gap_ms}"
    chains = [[Plan((Prompt(number, prompt),))] for number in range(requests)]
    # Stamps are of the same clock, which starts with the machine.
    answers = await answers_of(targets, Job(chains, at_once, keeps_text=True), started=0.0)
    if bad := next((answer for answer in answers if not answer.ok), None):
        raise StartupError(f"the echo of the client's own cost failed: {bad.error}")
    return answers


def _late_ms(answer: Answer) -> Sequence[float]:
    """From the stamp of each chunk to its arrival; a whole answer has one arrival, of the last stamp."""
    sent = [*map(float, (answer.text or "").split())][-len(answer.arrivals_s) :]
    return [1000 * (at - stamp) for at, stamp in zip(answer.arrivals_s, sent, strict=True)]


def _added_gaps_ms(answer: Answer) -> Sequence[float]:
    """How far a gap is from that between the stamps; a whole answer has none."""
    return [abs(b - a) for a, b in pairwise(_late_ms(answer))] or [0.0]


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p90, p99."""
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return (cuts[49], cuts[89], cuts[98])


@asynccontextmanager
async def _echo_server(protocol: str) -> AsyncIterator[Url]:
    """In a process of its own, which ends with this one."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trtmesh.tools.bench.echo_server", protocol),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Ctrl-C is for this process alone, which then ends the other.
        process_group=0,
    )
    assert process.stdout
    try:
        if not (address := (await process.stdout.readline()).decode().strip()):
            raise StartupError("the server of the echo did not start; --no-echo goes without it")
        yield Url(protocol, (address,))
    finally:
        process.kill()
        await process.wait()
