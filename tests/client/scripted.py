"""A scripted router on a real socket, for what a real one never does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from trtmesh.v1 import router_pb2, router_pb2_grpc

Context = grpc.aio.ServicerContext[router_pb2.GenerateRequest, router_pb2.GenerateResponse]
Script = Callable[[router_pb2.GenerateRequest, Context], AsyncIterator[router_pb2.GenerateResponse]]


class ScriptedRouter(router_pb2_grpc.MeshServiceServicer):
    """Answers Generate as `script` says and remembers what it was asked."""

    def __init__(self) -> None:
        self.script: Script | None = None
        self.requests: list[router_pb2.GenerateRequest] = []
        self.stops: list[router_pb2.StopRequest] = []
        self.time_remaining: float | None = None
        self.call_ended = asyncio.Event()

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        self.requests.append(request)
        self.time_remaining = context.time_remaining()
        assert self.script is not None
        try:
            async for response in self.script(request, context):
                yield response
        finally:
            self.call_ended.set()

    async def Stop(
        self, request: router_pb2.StopRequest, context: object
    ) -> router_pb2.StopResponse:
        self.stops.append(request)
        return router_pb2.StopResponse(stopped_items=len(request.batch_indexes))
