"""The async client of a mesh."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Self, Unpack

import grpc
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.errors import (
    REASON_METADATA_KEY,
    StreamIncomplete,
    TrtmeshError,
    from_status,
)
from trtmesh.client.events import Event, ItemFailed, ItemFinished, events_of
from trtmesh.client.options import Options, PromptLike, build_config, build_items
from trtmesh.client.results import ItemResult, Results
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import (
    router_admin_pb2,
    router_admin_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

DEFAULT_ADDRESS = "127.0.0.1:8001"


class Client:
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
        self.address = address
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self.address, self._max_message_bytes)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        channel, self._channel = self._open, None
        await channel.close()

    @property
    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError("the client is not open; use `async with Client(...) as client:`")
        return self._channel

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
            with _typed_errors():
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
        with _typed_errors():
            response = await router_pb2_grpc.MeshServiceStub(self._open).Stop(
                request, timeout=timeout_seconds
            )
        return response.stopped_items

    async def status(
        self, *, timeout_seconds: float | None = 10.0
    ) -> router_admin_pb2.ListWorkersResponse:
        """The workers and tokenizers that the router sees."""
        stub = router_admin_pb2_grpc.RouterAdminServiceStub(self._open)
        with _typed_errors():
            return await stub.ListWorkers(
                router_admin_pb2.ListWorkersRequest(), timeout=timeout_seconds
            )


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Turns a failed call into the error that the router meant."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        reason = error.trailing_metadata().get(REASON_METADATA_KEY)
        text = reason.decode() if isinstance(reason, bytes) else reason
        raise from_status(error.code(), text, error.details() or error.code().name) from error
    except asyncio.CancelledError as error:
        # Closing the client cancels its calls, and grpc.aio raises this in tasks that nobody cancelled.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TrtmeshError("the client was closed during the call") from error
