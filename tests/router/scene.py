"""A router between a scripted worker and a scripted tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.scripted import (
    READY,
    RouterClient,
    ScriptedEngine,
    merged,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.client import ItemResult
from trtmesh.v1 import router_admin_pb2 as admin_pb


@dataclass
class Scene:
    """A router, a scripted engine and a scripted tokenizer."""

    engine: ScriptedEngine
    tokenizer: ScriptedTokenizer
    client: RouterClient
    requests: list[asyncio.Task[Any]] = field(default_factory=list)

    def ask(self, *prompts: Any, **options: Any) -> asyncio.Task[list[ItemResult]]:
        asked: asyncio.Task[Any] = asyncio.create_task(self.client.complete(prompts, **options))
        self.requests.append(asked)
        return asked


@asynccontextmanager
async def scene(
    engine: ScriptedEngine | None = None,
    tokenizer: ScriptedTokenizer | None = None,
    workers: int = READY,
    **settings: Any,
) -> AsyncIterator[Scene]:
    engine = engine or ScriptedEngine(supported_fields=["stopping.max_tokens"])
    tokenizer = tokenizer or ScriptedTokenizer()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving_engine(engine))]
        tokenizers = [await stack.enter_async_context(serving_tokenizer(tokenizer))]
        settings = merged({"retries": {"worker_wait_seconds": 0.2}}, settings)
        client = await stack.enter_async_context(serving_router(engines, tokenizers, **settings))
        await until_states(client, [admin_pb.WorkerState.ValueType(workers)], [READY])
        scene = Scene(engine, tokenizer, client)
        try:
            yield scene
        finally:
            for request in scene.requests:
                request.cancel()
            await asyncio.gather(*scene.requests, return_exceptions=True)
