"""One run: warms up, sends a workload under a load, and records what comes back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.cli.output import say, say_error
from trtmesh.cli.session import FAILED, OK
from trtmesh.tools.bench.driver import MOST_OPEN, Driver, chains_of
from trtmesh.tools.bench.echo import echo
from trtmesh.tools.bench.live import live_view
from trtmesh.tools.bench.loads import planned
from trtmesh.tools.bench.processes import Job, sending
from trtmesh.tools.bench.record import Answer, Echo, Header, Line, Load, Plan, Prompt, Run, RunEnd
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
    seed: int = 0
    command: str = ""
    connections: int = 1
    """Of each process."""
    processes: int = 1
    echoes: bool = False
    """Whether the client's own cost is measured first."""
    warmup: int = 0
    """Plans at the beginning of the workload that are sent before the run, and are in no figure."""
    duration_s: float | None = None
    timeout_s: float | None = None
    """Of a request."""
    keeps_text: bool = False


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


@dataclass(slots=True)
class _Recorded:
    record: RunFile | None
    show: Callable[[Line], None]
    answers: list[Answer] = field(default_factory=list)

    def tell(self, line: Line) -> None:
        if isinstance(line, Answer):
            self.answers.append(line)
        if self.record:
            self.record.write(line)
        self.show(line)


async def measure(setup: Setup, load: Load, plans: Sequence[Plan], watch: Watch) -> Run:
    """Sends the plans under the load. Ctrl-C, which cancels the task, ends the run once it sends; then it has the
    answers so far."""
    with live_view(load, sum(len(plan.prompts) for plan in plans[setup.warmup :])) as show:
        return await _measured(setup, load, plans, watch, _Recorded(watch.record, show))


async def _measured(
    setup: Setup, load: Load, plans: Sequence[Plan], watch: Watch, recorded: _Recorded
) -> Run:
    warming, measured = plans[: setup.warmup], plans[setup.warmup :]
    job = _job(setup, load, measured)
    own_cost = await echo(setup.connecting.url.protocol, _expected(load)) if setup.echoes else None
    async with opened(setup.connecting, setup.connections) as targets:
        await connect(targets, plans)
        await _warm_up(targets, warming, load, setup.timeout_s)
        header = _header(setup, load, own_cost, targets[0].release)
        recorded.tell(header)
        async with (
            _sending(setup, job, targets, recorded.tell) as sender,
            _beside(watch.disruptor, sender.clock),
            _beside(watch.metrics, sender.clock),
        ):
            interrupted = await _is_interrupted(sender.send())
            ended_s = sender.clock()
    end = RunEnd(
        ended_s,
        interrupted,
        client_busy=round(sender.busy(), 4),
        unsent=sum(len(plan.prompts) for plan in measured) - len(recorded.answers),
        disruptions=tuple(watch.disruptor.made) if watch.disruptor else (),
    )
    samples = tuple(watch.metrics.samples()) if watch.metrics else ()
    for sample in samples:
        recorded.tell(sample)
    recorded.tell(end)
    return Run(header, tuple(recorded.answers), end, samples)


def _job(setup: Setup, load: Load, plans: Sequence[Plan]) -> Job:
    return Job(
        setup.connecting,
        chains_of(planned(plans, load, setup.seed)),
        most_open=load.concurrency or MOST_OPEN,
        connections=setup.connections,
        duration_s=setup.duration_s,
        timeout_s=setup.timeout_s,
        keeps_text=setup.keeps_text,
    )


def _expected(load: Load) -> int:
    """Requests at a time; in an open loop a guess, those of a second."""
    rate = max(load.rate or 0.0, float(load.shape.get("to", 1.0)))
    return load.concurrency or math.ceil(rate)


@dataclass(frozen=True, slots=True)
class _Sender:
    """Sends a job, by this process or by others."""

    send: Callable[[], Awaitable[None]]
    clock: Callable[[], float]
    busy: Callable[[], float]


@asynccontextmanager
async def _sending(
    setup: Setup, job: Job, targets: Sequence[Target], tell: Callable[[Answer], None]
) -> AsyncIterator[_Sender]:
    if setup.processes > 1:
        async with sending(job, setup.processes, tell) as others:
            yield _Sender(others.send, others.clock, others.busy)
        return
    own = Driver(targets, tell, keeps_text=job.keeps_text, timeout_s=job.timeout_s)
    send = partial(own.send, job.chains, job.most_open, job.duration_s)
    yield _Sender(send, own.clock, own.busy)


async def _warm_up(
    targets: Sequence[Target], plans: Sequence[Plan], load: Load, timeout_s: float | None
) -> None:
    """In a closed loop, and without figures."""
    at_once = load.concurrency or len(targets)
    driver = Driver(targets, lambda _: None, timeout_s=timeout_s)
    await driver.send(chains_of(planned(plans, Load("closed"), 0)), at_once)


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
        command=setup.command,
        tool=version("trtmesh"),
        started_unix_s=time.time(),
        warmup=setup.warmup,
        duration_s=setup.duration_s,
        connections=setup.connections,
        processes=setup.processes,
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
    plans = [Plan((Prompt(at, text, max_tokens=1),)) for at, text in enumerate(texts)]
    answers: list[Answer] = []
    async with opened(connecting, 1) as targets:
        driver = Driver(targets, answers.append, timeout_s=CONNECT_SECONDS)
        await driver.send(chains_of(plans), COUNTED_AT_ONCE)
    for answer in answers:
        if not answer.ok:
            raise InvalidRequest(f"the server counts no tokens: {answer.error}")
    counts = {answer.index: answer.prompt_tokens for answer in answers}
    if None in counts.values():
        raise InvalidRequest("the server does not tell the tokens of a prompt; give --tokenizer")
    return [counts[at] or 0 for at in range(len(texts))]
