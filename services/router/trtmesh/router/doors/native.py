"""MeshService: the native API over the live requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trtmesh.chassis.forwarding import Sink
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.chassis.rpc import RpcContext, ServedContext, request_id_of
from trtmesh.router.callers.callers import Callers
from trtmesh.router.doors.generation import (
    GenerationCall,
    RunningCall,
    caller_of,
    identity_of,
)
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.requests import Requests
from trtmesh.router.streams.client_stream import Waiting, as_response
from trtmesh.router.tracing import CallTrace
from trtmesh.router.values.request import parse_request, parse_stopped
from trtmesh.router.values.resumption import parse_resumption
from trtmesh.v1 import router_pb2 as pb
from trtmesh.v1 import router_pb2_grpc

DOOR = "native"
"""Its name in metrics and traces."""


class MeshService(router_pb2_grpc.MeshServiceServicer):
    """Translates native calls into requests, and their events into responses."""

    def __init__(
        self,
        requests: Requests,
        callers: Callers,
        metrics: RouterMetrics,
    ) -> None:
        self._requests = requests
        self._callers = callers
        self._metrics = metrics

    def _call(self, model: str, context: ServedContext) -> GenerationCall:
        """The block of a call."""
        headers = context.invocation_metadata() or ()
        trace = CallTrace.begin(self._requests.tracer, DOOR, headers)
        return GenerationCall(DOOR, self._requests.metrics_of(model), trace=trace)

    # mypy-protobuf types generators only; grpc.aio also accepts a coroutine with writes.
    async def Generate(self, request: pb.GenerateRequest, context: ServedContext) -> None:  # type: ignore[override]
        own_id = request_id_of(context)
        rebind_request_id(request.request_id)
        with self._call(request.model, context) as call:
            caller = caller_of(self._callers, context)
            message = context.message
            with message.admitted():
                valid = await message.read(partial(parse_request, request, own_id))
                # Its texts are in the valid request, too.
                del request
                rebind_request_id(valid.request_id)
                opening = self._requests.open(
                    valid, caller.remaining_seconds, caller.identity, caller.origin
                )
                async with RunningCall(call, opening) as live:
                    await live.client.forward(Responses(context, self._metrics))

    # mypy-protobuf types generators only; grpc.aio also accepts a coroutine with writes.
    async def Resume(self, request: pb.ResumeRequest, context: ServedContext) -> None:  # type: ignore[override]
        rebind_request_id(request.request.request_id)
        with self._call(request.request.model, context) as call:
            caller = caller_of(self._callers, context)
            message = context.message
            with message.admitted():
                valid, received = await message.read(partial(parse_resumption, request))
                del request
                opening = self._requests.resume(
                    valid, received, caller.remaining_seconds, caller.identity, caller.origin
                )
                async with RunningCall(call, opening) as live:
                    self._metrics.resumed += 1
                    await live.client.forward(ResumeResponses(context, self._metrics))

    async def Stop(self, request: pb.StopRequest, context: RpcContext) -> pb.StopResponse:
        rebind_request_id(request.request_id)
        owner = identity_of(self._callers, context, context.invocation_metadata() or ())
        items = parse_stopped(request)
        stopped = self._requests.stop(owner, request.request_id, items)
        return pb.StopResponse(stopped_items=stopped)


class Responses(Sink[Sequence[Waiting]]):
    """Writes one response for each batch of events."""

    def __init__(self, context: ServedContext, metrics: RouterMetrics) -> None:
        self._context, self._metrics = context, metrics

    def write_now(self, message: Sequence[Waiting]) -> bool:
        if not self._context.write_now(as_response(message)):
            return False
        self._metrics.client_messages += 1
        return True

    async def write(self, message: Sequence[Waiting]) -> None:
        await self._context.write(as_response(message))
        self._metrics.client_messages += 1


class ResumeResponses(Responses):
    """The same in the form of `Resume`. It is always waited for: clients resume rarely."""

    def write_now(self, message: Sequence[Waiting]) -> bool:
        return False

    async def write(self, message: Sequence[Waiting]) -> None:
        await self._context.write(pb.ResumeResponse(events=as_response(message).events))
        self._metrics.client_messages += 1
