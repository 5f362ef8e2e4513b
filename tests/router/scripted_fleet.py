"""Scripted engines, their router, and helpers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

from router.scripted import (
    LENGTH,
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    merged,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.client import ItemResult
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

FIELDS = [
    "stopping.max_tokens", "sampling.seed", "sampling.temperature", "sampling.num_return_sequences",
    "output.log_probs", "output.prompt_log_probs",
]  # fmt: skip

DEFAULTS = {"retries": {"worker_wait_seconds": 0.3}, "deadlines": {"silence_seconds": 60}}


class Fleet:
    """Scripted engines and their router."""

    def __init__(self, engines: Sequence[ScriptedEngine], client: RouterClient) -> None:
        self.engines = engines
        self.client = client
        self._asked: list[asyncio.Task[Any]] = []

    def ask(self, *prompts: Any, **options: Any) -> asyncio.Task[list[ItemResult]]:
        options = {"text": False, "max_tokens": 9} | options
        asked: asyncio.Task[Any] = asyncio.create_task(self.client.complete(prompts, **options))
        self._asked.append(asked)
        return asked

    def start(self, *prompts: Any, **options: Any) -> None:
        """Sends a request and ignores the result."""
        _ = self.ask(*prompts, **options)

    async def end(self) -> None:
        for asked in self._asked:
            asked.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    def serve(self, engine: ScriptedEngine) -> None:
        """Makes an engine end every new item with one token."""
        self._asked.append(asyncio.create_task(_serve(engine)))

    def refuse(self, engine: ScriptedEngine, error: TrtmeshError) -> None:
        """Makes an engine refuse the items that are there, and every new one."""
        self._asked.append(asyncio.create_task(_refuse(engine, error)))

    def beat(self, engine: ScriptedEngine) -> None:
        """Makes an engine report steps and tokens repeatedly, and end what it is asked to."""
        self._asked.append(asyncio.create_task(_beat(engine)))

    async def worker(self, engine: ScriptedEngine) -> admin_pb.Worker:
        """An engine as the router sees it."""
        seen = (await self.client.status()).workers
        return next(each for each in seen if each.worker == engine.description.worker)

    async def candidates(self, request_id: str) -> dict[str, admin_pb.PlacementCandidate]:
        """The workers of a request's latest placement, by name."""
        explained = await self.client.admin.explain(request_id)
        return {each.worker: each for each in explained.placements[-1].candidates}

    async def first(self) -> ScriptedEngine:
        """Waits for the first item; returns its engine."""
        await eventually(lambda: any(engine.submits for engine in self.engines))
        return next(engine for engine in self.engines if engine.submits)

    async def submitted(self, count: int) -> None:
        """Waits until the engines have received so many items together."""
        await eventually(lambda: sum(len(engine.submits) for engine in self.engines) >= count)

    def other(self, engine: ScriptedEngine) -> ScriptedEngine:
        return next(each for each in self.engines if each is not engine)


async def _serve(engine: ScriptedEngine) -> None:
    served = len(engine.submits)
    while True:
        for submit in (await engine.submitted(served + 1))[served:]:
            await engine.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])
            served += 1


async def _refuse(engine: ScriptedEngine, error: TrtmeshError) -> None:
    refused = 0
    while True:
        for submit in (await engine.submitted(refused + 1))[refused:]:
            await engine.step(ends=[refusal(submit.handle, error)])
            refused += 1


async def _beat(engine: ScriptedEngine) -> None:
    ended = 0
    for number in count(1):
        await engine.report(step_count=number, running_sequences=1, generated_tokens=number)
        if stops := engine.stops[ended:]:
            ended += len(stops)
            await engine.step(ends=stops)
        await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet(
    *engines: ScriptedEngine, tokenizers: Sequence[ScriptedTokenizer] = (), **settings: Any
) -> AsyncIterator[Fleet]:
    engines = engines or tuple(
        ScriptedEngine(worker=name, supported_fields=FIELDS) for name in ("one", "two")
    )
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving_engine(e)) for e in engines]
        texts = [await stack.enter_async_context(serving_tokenizer(t)) for t in tokenizers]
        settings = merged(DEFAULTS, settings)
        client = await stack.enter_async_context(serving_router(addresses, texts, **settings))
        await until_states(client, [READY] * len(engines), [READY] * len(texts))
        fleet = Fleet(engines, client)
        try:
            yield fleet
        finally:
            await fleet.end()


def refusal(handle: int, error: TrtmeshError) -> epb.SequenceEnd:
    return epb.SequenceEnd(
        handle=handle,
        reason=pb.FINISH_REASON_ERROR,
        error=to_proto(error),
    )
