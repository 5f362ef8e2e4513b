"""The async client of a mesh."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Unpack

from trtmesh.chassis.errors import StreamIncomplete
from trtmesh.client.connection import Connection, typed_errors
from trtmesh.client.events import Event, ItemFailed, ItemFinished, events_of
from trtmesh.client.options import Options, PromptLike, build_config, build_items
from trtmesh.client.results import ItemResult, Results
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:8001"


class Client(Connection):
    """Talks to one router over one connection, from one event loop.

        async with Client("127.0.0.1:8001") as client:
            async with aclosing(client.generate(["def fibonacci(n):"], max_tokens=32)) as events:
                async for event in events:
                    ...

    Every call raises an error of `trtmesh.chassis.errors` when it fails.
    """

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, max_message_bytes: int = 64 * 2**20
    ) -> None:
        super().__init__(address, max_message_bytes=max_message_bytes)

    async def generate(
        self,
        prompts: Sequence[PromptLike],
        *,
        config: pb.GenerationConfig | None = None,
        request_id: str = "",
        model: str = "",
        timeout_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event, None]:
        """Yields what happens to the prompts until each had its terminal event.

        `options` override fields of `config`. Without `request_id` one is drawn; `Accepted` carries it. The call is
        cancelled when the generator is closed, so leave an `async for` early only inside `contextlib.aclosing`:
        a `break` alone leaves the closing to the garbage collector. Raises StreamIncomplete when the stream ends
        without a terminal event of every prompt.
        """
        request = router_pb2.GenerateRequest(
            request_id=request_id or uuid.uuid4().hex,
            model=model,
            items=build_items(prompts),
            config=build_config(config, options),
        )
        call = router_pb2_grpc.MeshServiceStub(self._open).Generate(
            request, timeout=timeout_seconds
        )
        unfinished = set(range(len(request.items)))
        try:
            with typed_errors():
                async for response in call:
                    for event in events_of(response):
                        if isinstance(event, ItemFinished | ItemFailed):
                            unfinished.discard(event.batch_index)
                        yield event
        finally:
            call.cancel()
        if unfinished:
            raise StreamIncomplete(
                f"the stream of request {request.request_id} ended without a terminal event of"
                f" item {', '.join(map(str, sorted(unfinished)))}"
            )

    async def complete(
        self,
        prompts: Sequence[PromptLike],
        *,
        config: pb.GenerationConfig | None = None,
        request_id: str = "",
        model: str = "",
        timeout_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> Sequence[ItemResult]:
        """What each prompt came to, in their order; a failed item has its `error` set, and nothing is raised."""
        results = Results(len(prompts))
        events = self.generate(
            prompts,
            config=config,
            request_id=request_id,
            model=model,
            timeout_seconds=timeout_seconds,
            **options,
        )
        async with aclosing(events):
            async for event in events:
                results.add(event)
        return results.items

    async def stop(
        self,
        request_id: str,
        batch_indexes: Sequence[int] = (),
        *,
        timeout_seconds: float | None = 10.0,
    ) -> int:
        """Stops a request, or some of its items; returns how many were running or waiting."""
        request = router_pb2.StopRequest(request_id=request_id, batch_indexes=batch_indexes)
        with typed_errors():
            response = await router_pb2_grpc.MeshServiceStub(self._open).Stop(
                request, timeout=timeout_seconds
            )
        return response.stopped_items
