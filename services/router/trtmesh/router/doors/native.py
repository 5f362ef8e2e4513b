"""MeshService: the native API over the live requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.chassis.rpc import answering, request_id_of
from trtmesh.router.callers.callers import Callers
from trtmesh.router.doors.generation import GenerationCall, caller_of, identity_of
from trtmesh.router.doors.parsing import Parsing
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.requests.requests import Requests
from trtmesh.router.streams.client_stream import as_response
from trtmesh.router.values.request import GenerationRequest, parse_request, parse_stopped
from trtmesh.router.values.resumption import parse_received
from trtmesh.v1 import router_pb2 as pb
from trtmesh.v1 import router_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class MeshService(router_pb2_grpc.MeshServiceServicer):
    """Translates native calls into requests, and their events into responses."""

    def __init__(self, requests: Requests, callers: Callers, metrics: RouterMetrics) -> None:
        self._requests = requests
        self._callers = callers
        self._metrics = metrics
        self._parsing = Parsing()

    # mypy-protobuf types generators only; grpc.aio also accepts a coroutine with writes.
    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # type: ignore[override]
        with GenerationCall(self._metrics) as call:
            async with answering(context, request.request_id):
                caller = caller_of(self._callers, context)
                size = request.ByteSize()
                with self._requests.holding(size):
                    valid = await self._parsed(request, size, request_id_of(context))
                    rebind_request_id(valid.request_id)
                    opening = self._requests.open(valid, caller.remaining_seconds, caller.identity)
                    async with call.running(opening) as live:
                        await self._forward(live, context.write)

    # mypy-protobuf types generators only; grpc.aio also accepts a coroutine with writes.
    async def Resume(self, request: pb.ResumeRequest, context: _Context) -> None:  # type: ignore[override]
        async def write(response: pb.GenerateResponse) -> None:
            await context.write(pb.ResumeResponse(events=response.events))

        with GenerationCall(self._metrics) as call:
            async with answering(context, request.request.request_id):
                caller = caller_of(self._callers, context)
                size = request.request.ByteSize()
                with self._requests.holding(size):
                    valid = await self._parsed(request.request, size, "")
                    received = parse_received(request, valid)
                    opening = self._requests.resume(
                        valid, received, caller.remaining_seconds, caller.identity
                    )
                    async with call.running(opening) as live:
                        self._metrics.resumed += 1
                        await self._forward(live, write)

    async def _parsed(
        self, request: pb.GenerateRequest, size: int, request_id: str
    ) -> GenerationRequest:
        most = self._requests.max_items_per_request
        return await self._parsing.run(size, lambda: parse_request(request, request_id, most))

    async def _forward(
        self, live: LiveRequest, write: Callable[[pb.GenerateResponse], Awaitable[None]]
    ) -> None:
        """Writes one response for each batch of events until all items are over."""
        while (waiting := await live.client.next_entries()) is not None:
            await write(as_response(waiting))
            self._metrics.client_messages += 1

    async def Stop(self, request: pb.StopRequest, context: _Context) -> pb.StopResponse:
        async with answering(context, request.request_id):
            owner = identity_of(self._callers, context)
            items = parse_stopped(request, self._requests.max_items_per_request)
            stopped = self._requests.stop(owner, request.request_id, items)
            return pb.StopResponse(stopped_items=stopped)
