"""Connections to the target of a URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from trtmesh.chassis.errors import Unavailable
from trtmesh.tools.bench.driver import Job, answers_of
from trtmesh.tools.bench.record import AnswerOutcome, Plan
from trtmesh.tools.bench.targets.generate_stream import generate_stream_target
from trtmesh.tools.bench.targets.kserve import kserve_target
from trtmesh.tools.bench.targets.native import native_target
from trtmesh.tools.bench.targets.openai import openai_target
from trtmesh.tools.bench.targets.target import Connecting, OpenTarget, Target

CONNECT_SECONDS = 60.0
"""For the first token over a connection."""


OPENERS: Mapping[str, Callable[[Connecting], OpenTarget]] = {
    "grpc": native_target,
    "triton": kserve_target,
    "triton+unary": kserve_target,
    "triton+http": generate_stream_target,
    "openai": openai_target,
}


@asynccontextmanager
async def opened(connecting: Connecting, count: int) -> AsyncIterator[Sequence[Target]]:
    """So many connections. Raises TrtmeshError, also where the server is silent."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                opener = OPENERS[connecting.url.protocol]
                own = [await stack.enter_async_context(opener(connecting)) for _ in range(count)]
        except TimeoutError as error:
            why = f"{connecting.url} does not say what it serves within {CONNECT_SECONDS:g} s"
            raise Unavailable(why) from error
        yield own


async def connect(targets: Sequence[Target], plans: Sequence[Plan]) -> None:
    """Has each connection answer a token, which opens it. Raises the error of a server that cannot."""
    for plan in plans[:1]:
        (first, *_) = plan.prompts
        prompt = replace(
            first, text="Hello" if first.text else first.text, ids=first.ids[:1], max_tokens=1
        )
        for target in targets:
            job = Job([[Plan((prompt,))]], timeout_s=CONNECT_SECONDS)
            (answer,) = await answers_of([target], job)
            if answer.outcome is AnswerOutcome.ERROR:
                raise Unavailable(f"the target answers no request of one token: {answer.error}")
