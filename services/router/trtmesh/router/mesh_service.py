"""The public door: messages in, messages out, no decisions."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from trtmesh.chassis.errors import UnsupportedCall
from trtmesh.chassis.rpc import answering, request_id_of
from trtmesh.router.admission import key_name
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.request import parse_request
from trtmesh.router.requests import LiveRequest, Requests
from trtmesh.v1 import router_pb2 as pb
from trtmesh.v1 import router_pb2_grpc

_Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class MeshService(router_pb2_grpc.MeshServiceServicer):
    """MeshService over the live requests."""

    def __init__(
        self, requests: Requests, metrics: RouterMetrics, max_items_per_request: int
    ) -> None:
        self._requests = requests
        self._metrics = metrics
        self._max_items = max_items_per_request

    # mypy-protobuf knows only generators; a coroutine that writes is the other form that grpc.aio accepts.
    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # type: ignore[override]
        outcome = "refused"
        try:
            async with answering(context, request.request_id):
                valid = parse_request(request, request_id_of(context), self._max_items)
                key = key_name(_metadata_of(context))
                async with self._requests.open(valid, context.time_remaining(), key) as live:
                    outcome = "cancelled"
                    await self._forward(live, context)
                    outcome = "complete"
        finally:
            self._metrics.requests[outcome] += 1

    async def _forward(self, live: LiveRequest, context: _Context) -> None:
        """Writes what comes until all items are over."""
        try:
            while (response := await live.client.take()) is not None:
                await context.write(response)
                self._metrics.client_messages += 1
        except asyncio.CancelledError:
            if live.overrun is None:
                raise
            raise live.overrun from None

    async def Stop(
        self,
        request: pb.StopRequest,
        context: grpc.aio.ServicerContext[pb.StopRequest, pb.StopResponse],
    ) -> pb.StopResponse:
        async with answering(context, request.request_id):
            stopped = self._requests.stop(request.request_id, frozenset(request.batch_indexes))
            return pb.StopResponse(stopped_items=stopped)

    # mypy-protobuf knows only generators; a coroutine that writes is the other form that grpc.aio accepts.
    async def Resume(  # type: ignore[override]
        self,
        request: pb.ResumeRequest,
        context: grpc.aio.ServicerContext[pb.ResumeRequest, pb.ResumeResponse],
    ) -> None:
        async with answering(context, request.request.request_id):
            raise UnsupportedCall("Resume is not served by this release; send the request again")


def _metadata_of(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
