"""One run: warms up, sends a workload under a load, and records what comes back."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.cli.output import say, say_error
from trtmesh.cli.session import FAILED, OK
from trtmesh.tools.bench.driver import MOST_OPEN, Driver, Job, answers_of, chains_of
from trtmesh.tools.bench.echo import echo
from trtmesh.tools.bench.live import live_view
from trtmesh.tools.bench.loads import planned
from trtmesh.tools.bench.options import ClientOptions
from trtmesh.tools.bench.processes import Sending, sending
from trtmesh.tools.bench.record import (
    Answer,
    Echo,
    Header,
    Line,
    Load,
    Plan,
    Prompt,
    Run,
    RunEnd,
    without_secrets,
)
from trtmesh.tools.bench.run_file import RunFile
from trtmesh.tools.bench.server_metrics import ServerMetrics
from trtmesh.tools.bench.targets.opening import CONNECT_SECONDS, connect, opened
from trtmesh.tools.bench.targets.target import Connecting, Target
from trtmesh.tools.bench.workloads.words import Count

if TYPE_CHECKING:
    from trtmesh.tools.bench.disruptions import Faults

COUNTED_AT_ONCE = 16
TELL_PROMPT_TOKENS = ("grpc", "openai")
"""Protocols with the number of a prompt's tokens in every answer."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the runs of a command share."""

    connecting: Connecting
    workload: str
    """In words, for the record."""
    client: ClientOptions
    seed: int = 0
    warmup: int = 0
    """Plans at the beginning of the workload that are sent before the run, and are in no figure."""
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """What happens beside a run."""

    record: RunFile | None = None
    disruptor: Faults | None = None
    metrics: ServerMetrics | None = None

    def told(self) -> int:
        """Says what was not kept, and returns the exit status."""
        if self.metrics and (problems := self.metrics.problems):
            say(f"trtmesh: note: {len(problems)} readings of metrics failed: {problems[-1]}")
        if self.record and self.record.problem:
            say_error(self.record.problem)
            return FAILED
        return OK


@asynccontextmanager
async def watching(client: ClientOptions) -> AsyncIterator[Watch]:
    """The record and the metrics. Raises SettingsError where one of them cannot be."""
    metrics = ServerMetrics(client.metrics) if client.metrics else None
    if metrics:
        await metrics.check()
    with RunFile(client.record) if client.record else nullcontext() as file:
        yield Watch(file, metrics=metrics)


async def measure(setup: Setup, load: Load, plans: Sequence[Plan], watch: Watch) -> Run:
    """Sends the plans under the load. Ctrl-C, which cancels the task, ends the run once it sends; then it has the
    answers so far."""
    warming, measured = plans[: setup.warmup], plans[setup.warmup :]
    items = sum(len(plan.prompts) for plan in measured)
    async with live_view(load, items) as show:
        return await _measured(setup, load, warming, measured, watch, show)


async def _measured(
    setup: Setup,
    load: Load,
    warming: Sequence[Plan],
    plans: Sequence[Plan],
    watch: Watch,
    show: Callable[[Line], None],
) -> Run:
    answers: list[Answer] = []

    def tell(line: Line) -> None:
        if isinstance(line, Answer):
            answers.append(line)
        if watch.record:
            watch.record.write(line)
        show(line)

    client, url = setup.client, setup.connecting.url
    job = Job(
        chains_of(planned(plans, load, setup.seed)),
        load.concurrency or MOST_OPEN,
        setup.duration_s,
        client.timeout,
        client.save_texts,
    )
    own_cost = await echo(url.protocol, _expected(load)) if client.echo else None
    async with opened(setup.connecting, client.connections) as targets:
        await connect(targets, [*warming, *plans])
        # In a closed loop, and without figures.
        chains = chains_of(planned(warming, Load("closed"), 0))
        await answers_of(
            targets, Job(chains, load.concurrency or len(targets), timeout_s=client.timeout)
        )
        header = _header(setup, load, own_cost, targets[0].release)
        tell(header)
        async with (
            _sending(setup, job, targets, tell) as sender,
            # They end in reverse order, and the last reading may take seconds.
            _beside(watch.metrics, sender.clock),
            _beside(watch.disruptor, sender.clock),
        ):
            interrupted = await _is_interrupted(sender.send())
            ended_s, busy = sender.clock(), sender.busy()
    end = RunEnd(
        ended_s,
        interrupted,
        client_busy=round(busy, 4),
        unsent=sum(len(plan.prompts) for plan in plans) - len(answers),
        disruptions=tuple(watch.disruptor.made) if watch.disruptor else (),
    )
    samples = tuple(watch.metrics.samples()) if watch.metrics else ()
    for sample in samples:
        tell(sample)
    tell(end)
    return Run(header, tuple(answers), end, samples)


def _expected(load: Load) -> int:
    """Requests at a time; in an open loop a guess, those of a second."""
    rate = max(load.rate or 0.0, float(load.shape.get("to", 1.0)))
    return load.concurrency or math.ceil(rate)


def _sending(
    setup: Setup, job: Job, targets: Sequence[Target], tell: Callable[[Answer], None]
) -> AbstractAsyncContextManager[Driver | Sending]:
    """By this process or by others."""
    client = setup.client
    if client.processes > 1:
        return sending(setup.connecting, client.connections, job, client.processes, tell)
    return nullcontext(Driver(targets, job, tell))


async def _is_interrupted(sending: Awaitable[None]) -> bool:
    try:
        await sending
    except asyncio.CancelledError:
        return True
    return False


@asynccontextmanager
async def _beside(
    companion: Faults | ServerMetrics | None, clock: Callable[[], float]
) -> AsyncIterator[None]:
    if companion is None:
        yield
        return
    task = asyncio.create_task(companion.run(clock))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _header(setup: Setup, load: Load, own_cost: Echo | None, release: str) -> Header:
    return Header(
        target=str(setup.connecting.url),
        protocol=setup.connecting.url.protocol,
        load=load,
        workload=setup.workload,
        seed=setup.seed,
        model=setup.connecting.model,
        release=release,
        command=without_secrets(["trtmesh", *sys.argv[1:]]),
        tool=version("trtmesh"),
        started_unix_s=time.time(),
        warmup=setup.warmup,
        duration_s=setup.duration_s,
        connections=setup.client.connections,
        processes=setup.client.processes,
        echo=own_cost,
    )


def batched(plans: Sequence[Plan], size: int) -> Sequence[Plan]:
    """The same prompts with so many in a request, the last with the rest; sessions stay as they are."""
    alone = [plan for plan in plans if not plan.session]
    groups = (alone[at : at + size] for at in range(0, len(alone), size))
    together = [
        Plan(tuple(prompt for plan in group for prompt in plan.prompts), group[0].planned_s)
        for group in groups
    ]
    return [*together, *(plan for plan in plans if plan.session)]


async def server_count(connecting: Connecting) -> Count | None:
    """The server's own count of tokens; None for a model of Triton that tells none."""
    if connecting.url.protocol not in TELL_PROMPT_TOKENS:
        try:
            await count_tokens(connecting, ["Hello"])
        except InvalidRequest:
            return None
    return partial(count_tokens, connecting)


async def count_tokens(connecting: Connecting, texts: Sequence[str]) -> Sequence[int]:
    """By the server: the prompt tokens of requests of one token. Raises InvalidRequest if it does not tell."""
    chains = [[Plan((Prompt(at, text, max_tokens=1),))] for at, text in enumerate(texts)]
    async with opened(connecting, 1) as targets:
        answers = await answers_of(targets, Job(chains, COUNTED_AT_ONCE, timeout_s=CONNECT_SECONDS))
    for answer in answers:
        if not answer.ok:
            raise InvalidRequest(f"the server counts no tokens: {answer.error}")
    counts = {answer.index: answer.prompt_tokens for answer in answers}
    if None in counts.values():
        raise InvalidRequest("the server does not tell the tokens of a prompt; give --tokenizer")
    return [counts[at] or 0 for at in range(len(texts))]
