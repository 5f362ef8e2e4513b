"""One run: warms up, sends a workload under a load, and records what comes back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Protocol

from trtmesh.chassis.errors import InvalidRequest, Unavailable
from trtmesh.tools.bench.driver import MOST_OPEN, Driver, chains_of
from trtmesh.tools.bench.loads import planned
from trtmesh.tools.bench.record import (
    Answer,
    AnswerOutcome,
    Disruption,
    Header,
    Line,
    Load,
    Plan,
    Prompt,
    Run,
    RunEnd,
)
from trtmesh.tools.bench.targets.opening import open_target
from trtmesh.tools.bench.targets.target import Connecting, Target
from trtmesh.tools.bench.workloads.words import Count

CONNECT_SECONDS = 60.0
"""For the first token over a connection."""
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
    warmup: int = 0
    """Plans at the beginning of the workload that are sent before the run, and are in no figure."""
    duration_s: float | None = None
    timeout_s: float | None = None
    """Of a request."""
    keeps_text: bool = False


class Disruptor(Protocol):
    """Makes faults during a run."""

    made: list[Disruption]

    async def run(self, clock: Callable[[], float]) -> None:
        """Makes each fault at its time by the clock of the run; is cancelled when the run ends."""


@dataclass(slots=True)
class Watch:
    """Who looks on while a run happens."""

    on_line: Sequence[Callable[[Line], object]] = ()
    """Told each line of the record when it is known."""
    disruptor: Disruptor | None = None


@dataclass(slots=True)
class _Recorded:
    watch: Watch
    answers: list[Answer] = field(default_factory=list)

    def tell(self, line: Line) -> None:
        if isinstance(line, Answer):
            self.answers.append(line)
        for told in self.watch.on_line:
            told(line)


async def measure(setup: Setup, load: Load, plans: Sequence[Plan], watch: Watch) -> Run:
    """Sends the plans under the load. Ctrl-C ends the run, which then has the answers so far."""
    recorded = _Recorded(watch)
    warming, measured = plans[: setup.warmup], plans[setup.warmup :]
    async with opened(setup.connecting, setup.connections) as targets:
        await _connect(targets, plans)
        await _warm_up(targets, warming, load)
        header = _header(setup, load)
        recorded.tell(header)
        driver = Driver(
            targets, recorded.tell, keeps_text=setup.keeps_text, timeout_s=setup.timeout_s
        )
        async with _disrupted(watch.disruptor, driver.clock):
            interrupted = await _sent(driver, setup, load, planned(measured, load, setup.seed))
    made = tuple(watch.disruptor.made) if watch.disruptor else ()
    unsent = sum(len(plan.prompts) for plan in measured) - len(recorded.answers)
    end = RunEnd(driver.clock(), interrupted, unsent, made)
    recorded.tell(end)
    return Run(header, tuple(recorded.answers), end)


@asynccontextmanager
async def opened(connecting: Connecting, count: int) -> AsyncIterator[Sequence[Target]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_target(connecting)) for _ in range(count)]


async def _connect(targets: Sequence[Target], plans: Sequence[Plan]) -> None:
    """Has each connection answer a token, which opens it. Raises the error of a server that cannot."""
    for plan in plans[:1]:
        (first, *_) = plan.prompts
        prompt = replace(
            first, text="Hello" if first.text else first.text, ids=first.ids[:1], max_tokens=1
        )
        for target in targets:
            answers: list[Answer] = []
            await Driver([target], answers.append, timeout_s=CONNECT_SECONDS).send(
                [[Plan((prompt,))]]
            )
            if answers[0].outcome is AnswerOutcome.ERROR:
                raise Unavailable(f"the target answers no request of one token: {answers[0].error}")


async def _warm_up(targets: Sequence[Target], plans: Sequence[Plan], load: Load) -> None:
    """In a closed loop, and without figures."""
    at_once = load.concurrency or len(targets)
    driver = Driver(targets, lambda _: None)
    await driver.send(chains_of(planned(plans, Load("closed"), 0)), at_once)


async def _sent(driver: Driver, setup: Setup, load: Load, plans: Sequence[Plan]) -> bool:
    """Returns whether Ctrl-C ended it."""
    at_once = load.concurrency or MOST_OPEN
    sending = asyncio.create_task(driver.send(chains_of(plans), at_once, setup.duration_s))
    interrupted = False

    def end() -> None:
        nonlocal interrupted
        interrupted = True
        sending.cancel()

    with _at_interrupt(end):
        try:
            await sending
        except asyncio.CancelledError:
            if not interrupted:
                raise
        finally:
            sending.cancel()
    return interrupted


def batched(plans: Sequence[Plan], size: int) -> Sequence[Plan]:
    """The same prompts with so many in a request, the last with the rest; sessions stay as they are."""
    alone = [plan for plan in plans if not plan.session]
    groups = (alone[at : at + size] for at in range(0, len(alone), size))
    together = [
        Plan(tuple(prompt for plan in group for prompt in plan.prompts), group[0].planned_s)
        for group in groups
    ]
    return [*together, *(plan for plan in plans if plan.session)]


def server_count(connecting: Connecting) -> Count | None:
    """The server's own count of tokens, if its protocol tells it."""
    tells = connecting.url.protocol in TELL_PROMPT_TOKENS
    return partial(count_tokens, connecting) if tells else None


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


@contextmanager
def _at_interrupt(end: Callable[[], None]) -> Iterator[None]:
    """Has Ctrl-C call `end` inside the block."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, end)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@asynccontextmanager
async def _disrupted(
    disruptor: Disruptor | None, clock: Callable[[], float]
) -> AsyncIterator[None]:
    if disruptor is None:
        yield
        return
    task = asyncio.create_task(disruptor.run(clock))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _header(setup: Setup, load: Load) -> Header:
    return Header(
        target=str(setup.connecting.url),
        protocol=setup.connecting.url.protocol,
        load=load,
        workload=setup.workload,
        seed=setup.seed,
        model=setup.connecting.model,
        command=setup.command,
        tool=version("trtmesh"),
        started_unix_s=time.time(),
        warmup=setup.warmup,
        duration_s=setup.duration_s,
        connections=setup.connections,
    )
