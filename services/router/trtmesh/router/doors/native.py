"""The public door: messages in, messages out, no decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.chassis.rpc import answering, request_id_of
from trtmesh.router.admission import key_name
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.requests.requests import Requests
from trtmesh.router.streams.client_stream import as_response
from trtmesh.router.values.request import parse_request
from trtmesh.router.values.resumption import parse_received
from trtmesh.v1 import router_pb2 as pb
from trtmesh.v1 import router_pb2_grpc


@dataclass(slots=True)
class _Outcome:
    """What became of a request: refused, cancelled or complete."""

    word: str = "refused"


class MeshService(router_pb2_grpc.MeshServiceServicer):
    """MeshService over the live requests."""

    def __init__(
        self, requests: Requests, metrics: RouterMetrics, max_items_per_request: int
    ) -> None:
        self._requests = requests
        self._metrics = metrics
        self._max_items = max_items_per_request

    # mypy-protobuf knows only generators; a coroutine that writes is the other form that grpc.aio accepts.
    async def Generate(  # type: ignore[override]
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> None:
        with self._counting() as outcome:
            async with answering(context, request.request_id):
                valid = parse_request(request, request_id_of(context), self._max_items)
                rebind_request_id(valid.request_id)
                key = key_name(_metadata_of(context))
                async with self._requests.open(valid, context.time_remaining(), key) as live:
                    outcome.word = "cancelled"
                    await self._forward(live, context.write)
                    outcome.word = "complete"

    # mypy-protobuf knows only generators; a coroutine that writes is the other form that grpc.aio accepts.
    async def Resume(  # type: ignore[override]
        self,
        request: pb.ResumeRequest,
        context: grpc.aio.ServicerContext[pb.ResumeRequest, pb.ResumeResponse],
    ) -> None:
        async def write(response: pb.GenerateResponse) -> None:
            await context.write(pb.ResumeResponse(events=response.events))

        with self._counting() as outcome:
            async with answering(context, request.request.request_id):
                valid = parse_request(request.request, "", self._max_items)
                received = parse_received(request, valid)
                key = key_name(_metadata_of(context))
                remaining = context.time_remaining()
                async with self._requests.resume(valid, received, remaining, key) as live:
                    outcome.word = "cancelled"
                    self._metrics.resumed += 1
                    await self._forward(live, write)
                    outcome.word = "complete"

    @contextmanager
    def _counting(self) -> Iterator[_Outcome]:
        """Counts a request by its outcome."""
        outcome = _Outcome()
        try:
            yield outcome
        finally:
            self._metrics.requests[outcome.word] += 1

    async def _forward(
        self, live: LiveRequest, write: Callable[[pb.GenerateResponse], Awaitable[None]]
    ) -> None:
        """Writes what comes until all items are over."""
        try:
            while (waiting := await live.client.take()) is not None:
                await write(as_response(waiting))
                self._metrics.client_messages += 1
        except asyncio.CancelledError:
            if live.ended is None:
                raise
            raise live.ended from None

    async def Stop(
        self,
        request: pb.StopRequest,
        context: grpc.aio.ServicerContext[pb.StopRequest, pb.StopResponse],
    ) -> pb.StopResponse:
        async with answering(context, request.request_id):
            stopped = self._requests.stop(request.request_id, frozenset(request.batch_indexes))
            return pb.StopResponse(stopped_items=stopped)


def _metadata_of(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
