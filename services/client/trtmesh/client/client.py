"""The async client of a mesh."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, Unpack

import grpc
from trtmesh.chassis.addresses import DEFAULT_ADDRESS
from trtmesh.chassis.bearer import ApiKey
from trtmesh.chassis.channels import GREETING_SECONDS
from trtmesh.chassis.errors import DeadlineExceeded, StreamIncomplete, TrtmeshError, Unavailable
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.client.channel import CONNECT_SECONDS, ServerChannel, typed_errors
from trtmesh.client.events import Event, events_of
from trtmesh.client.options import PromptLike, build_config, build_items, chat_item, encodable
from trtmesh.client.results import ItemResult, Results
from trtmesh.client.resumption import Progress
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc
from trtmesh.v1.generation_fields import Options

Metadata: TypeAlias = Sequence[tuple[str, str]]

RESUME_SECONDS = 10.0
"""Longest search for another router, with several addresses."""

REPEAT_SECONDS = 0.1
"""Pause before the routers are asked again in turn."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Result of a stop: the number of stopped items, and the errors of routers without an answer, by index."""

    items: int
    silent: dict[int, TrtmeshError]


async def stop_anywhere(
    routers: Sequence[ServerChannel], request: router_pb2.StopRequest, timeout_seconds: float | None
) -> Stopped:
    """Asks all routers at once, until the first has stopped an item. Raises a router's refusal."""
    asked = {
        asyncio.create_task(_stop(router, request, timeout_seconds)): number
        for number, router in enumerate(routers)
    }
    silent: dict[int, TrtmeshError] = {}
    try:
        for answer in asyncio.as_completed(asked):
            try:
                if items := await answer:
                    return Stopped(items, silent)
            except (Unavailable, DeadlineExceeded):
                continue
        for task, number in asked.items():
            if isinstance(error := task.exception(), TrtmeshError):
                silent[number] = error
        return Stopped(0, silent)
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def _stop(
    router: ServerChannel, request: router_pb2.StopRequest, timeout_seconds: float | None
) -> int:
    with typed_errors(router.address):
        stub = router_pb2_grpc.MeshServiceStub(router.channel)
        answer = await stub.Stop(request, timeout=timeout_seconds, metadata=router.metadata)
    return int(answer.stopped_items)


class Client:
    """Talks to a single router at a time, from a single event loop.

        async with Client("127.0.0.1:8001") as client:
            async with aclosing(client.generate(["def load_json(path):"], max_tokens=51)) as events:
                async for event in events:
                    ...

    With several addresses, a request continues on the next router after a loss or a refusal, even in the middle of a
    stream: the caller sees every event once. After `resume_seconds` without progress the call fails. With a
    single address a lost router fails the call at once, unless `resume_seconds` is set.

    With `tls` connections are encrypted, and routers checked: `ClientTls(ca=Path("ca.pem"))`. Unusable files
    raise SettingsError when the client is opened.

    `api_key` is a text or the result of `ApiKey.read`; every call carries the key. An address not of the form host:port
    raises SettingsError, failed calls raise an error of `trtmesh.chassis.errors`.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: ApiKey | str | None = None,
        max_message_bytes: int = 64 * 2**20,
        resume_seconds: float | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self.addresses = (address,) if isinstance(address, str) else tuple(address)
        if not self.addresses:
            raise ValueError("address is empty but must name at least one router")
        several = len(self.addresses) > 1
        self._resume_seconds = (
            RESUME_SECONDS if resume_seconds is None and several else (resume_seconds or 0.0)
        )
        connect_seconds = GREETING_SECONDS if several else CONNECT_SECONDS
        self._routers = [
            ServerChannel(
                address,
                max_message_bytes=max_message_bytes,
                connect_seconds=connect_seconds,
                tls=tls,
                secret=ApiKey.of(api_key) if isinstance(api_key, str) else api_key,
            )
            for address in self.addresses
        ]
        self._homes: dict[str, int | None] = {}
        """The router of each live request; None before the first answer, and between two routers."""
        self._stops: dict[str, list[router_pb2.StopRequest]] = {}
        """Confirmed stops of live requests; the next router of a request gets them too."""
        self._opened = AsyncExitStack()
        self._current = 0

    @property
    def address(self) -> str:
        """Address of the router in use."""
        return self.addresses[self._current]

    async def __aenter__(self) -> Self:
        for router in self._routers:
            await self._opened.enter_async_context(router)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def generate(
        self,
        prompts: Sequence[PromptLike],
        *,
        config: pb.GenerationConfig | None = None,
        request_id: str = "",
        model: str = "",
        timeout_seconds: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of the prompts, up to a terminal event for each.

        `metadata` goes with the call: a `traceparent` makes it a part of the caller's trace.
        `options` override fields of `config`. A missing `request_id` is drawn at random; `Accepted` carries it. Closing
        the generator cancels the call, so leave an `async for` early only inside `contextlib.aclosing`: a `break` alone
        leaves the closing to the garbage collector. Raises StreamIncomplete if a prompt has no terminal event.
        """
        request = router_pb2.GenerateRequest(
            items=build_items(prompts), config=build_config(config, options)
        )
        with encodable("request_id"):
            request.request_id = request_id or uuid.uuid4().hex
        with encodable("model"):
            request.model = model
        progress = Progress(request)
        try:
            events = self._events(progress, timeout_seconds, metadata)
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._homes.pop(request.request_id, None)
            self._stops.pop(request.request_id, None)
        if progress.unfinished:
            raise StreamIncomplete(
                f"the stream of request {request.request_id} ended without a terminal event of"
                f" item {', '.join(map(str, sorted(progress.unfinished)))}"
            )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str = "",
        timeout_seconds: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of an answer to a conversation, as `generate` does for a prompt. Each message has a `role`
        and a `content`; `chat_item` makes conversations for `generate` and `complete`."""
        item = chat_item(messages, tools=tools)
        return self.generate(
            [item], model=model, timeout_seconds=timeout_seconds, metadata=metadata, **options
        )

    async def repeat(
        self,
        item: router_pb2.GenerateItem,
        batch_index: int,
        *,
        model: str = "",
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of an item that was once asked for, alone, with the draws of its `batch_index`: with its
        seed it has the same tokens. Close the generator as that of `generate`."""
        request = router_pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=model,
            items=[*([router_pb2.GenerateItem()] * batch_index), item],
        )
        events = self._events(Progress.before_item(request, batch_index), timeout_seconds)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _events(
        self, progress: Progress, timeout_seconds: float | None, metadata: Metadata = ()
    ) -> AsyncGenerator[Event, None]:
        """Yields the new events, from router after router."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_seconds is None else loop.time() + timeout_seconds
        patience = loop.time() + self._resume_seconds
        router = first = self._current
        while True:
            self._homes[progress.request.request_id] = None
            remaining = None if deadline is None else deadline - loop.time()
            attempt = self._attempt(progress, router, remaining, metadata)
            try:
                async with aclosing(attempt):
                    async for event in attempt:
                        patience = loop.time() + self._resume_seconds
                        yield event
            except Unavailable:
                if loop.time() >= patience:
                    raise
            except DeadlineExceeded as error:
                if timeout_seconds is None:
                    raise
                raise _too_late(progress, timeout_seconds) from error
            else:
                return
            self._current = router = (router + 1) % len(self.addresses)
            if router == first:
                await asyncio.sleep(REPEAT_SECONDS)

    async def _attempt(
        self, progress: Progress, router: int, timeout_seconds: float | None, metadata: Metadata
    ) -> AsyncGenerator[Event, None]:
        """Requests the missing events from a router."""
        stub = router_pb2_grpc.MeshServiceStub(self._routers[router].channel)
        own = self._routers[router].metadata
        metadata = (*own, *metadata)
        call: grpc.aio.UnaryStreamCall[Any, Any]
        request_id = progress.request.request_id
        resuming = progress.accepted
        if resuming:
            call = stub.Resume(progress.rest(), timeout=timeout_seconds, metadata=metadata)
        else:
            call = stub.Generate(progress.request, timeout=timeout_seconds, metadata=metadata)
        try:
            with typed_errors(self._routers[router].address):
                async for response in call:
                    self._homes[request_id] = router
                    if resuming:
                        resuming = False
                        for stop in self._stops.get(request_id, ()):
                            await stub.Stop(stop, metadata=own)
                    for event in events_of(response):
                        if progress.add(event):
                            yield event
        finally:
            call.cancel()

    async def complete(
        self,
        prompts: Sequence[PromptLike],
        *,
        config: pb.GenerationConfig | None = None,
        request_id: str = "",
        model: str = "",
        timeout_seconds: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[Options],
    ) -> Sequence[ItemResult]:
        """The results in the order of the prompts. A failed item sets `error` in the result instead of raising."""
        results = Results(len(prompts))
        events = self.generate(
            prompts,
            config=config,
            request_id=request_id,
            model=model,
            timeout_seconds=timeout_seconds,
            metadata=metadata,
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
        """Stops a request, or some of the items, on any router; returns the number of live items.

        A request between two routers stops on the next. Raises Unavailable if no router
        answers, or none accepts the request within `timeout_seconds`.
        """
        request = router_pb2.StopRequest(request_id=request_id, batch_indexes=batch_indexes)
        loop = asyncio.get_running_loop()
        ends_at = float("inf") if timeout_seconds is None else loop.time() + timeout_seconds
        while True:
            seconds = None if timeout_seconds is None else max(0.0, ends_at - loop.time())
            stopped = await stop_anywhere(self._routers, request, seconds)
            moves = self._moves(request_id, stopped)
            if stopped.items or not moves or loop.time() >= ends_at:
                break
            await asyncio.sleep(REPEAT_SECONDS)
        if stopped.items and request_id in self._homes:
            self._stops.setdefault(request_id, []).append(request)
        if moves or len(stopped.silent) == len(self._routers):
            raise next(
                iter(stopped.silent.values()), Unavailable(f"no router has {request_id!r} yet")
            )
        return stopped.items

    def _moves(self, request_id: str, stopped: Stopped) -> bool:
        """Whether a live request of the client escaped a stop between two routers."""
        if stopped.items or not self._resume_seconds or request_id not in self._homes:
            return False
        home = self._homes[request_id]
        return home is None or home in stopped.silent


def _too_late(progress: Progress, timeout_seconds: float) -> DeadlineExceeded:
    """Returns the error for a passed deadline, noticed by router or client."""
    request = progress.request
    state = (
        f"{len(progress.unfinished)} of its {len(request.items)} items had not ended"
        if progress.accepted
        else "no router had accepted it"
    )
    return DeadlineExceeded(
        f"request {request.request_id} was not complete within its timeout of {timeout_seconds:g} s: {state};"
        " allow more time, or ask for fewer tokens"
    )
