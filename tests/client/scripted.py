"""A scripted router on a real socket, for what a real one never does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

Event = router_pb2.GenerateEvent
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


def response(*events: router_pb2.GenerateEvent) -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(events=events)


def accepted(request: router_pb2.GenerateRequest) -> router_pb2.GenerateEvent:
    return Event(accepted=router_pb2.RequestAccepted(request_id=request.request_id, model="demo"))


def tokens(
    batch: int, offset: int, ids: list[int], text: str, sequence: int = 0
) -> router_pb2.GenerateEvent:
    return Event(
        batch_index=batch,
        sequence_index=sequence,
        tokens=router_pb2.TokensGenerated(token_offset=offset, token_ids=ids, text=text),
    )


def sequence_finished(batch: int, sequence: int = 0) -> router_pb2.GenerateEvent:
    finished = router_pb2.SequenceFinished(reason=pb.FINISH_REASON_LENGTH, generated_tokens=2)
    return Event(batch_index=batch, sequence_index=sequence, sequence_finished=finished)


def item_finished(batch: int) -> router_pb2.GenerateEvent:
    finished = router_pb2.ItemFinished(
        reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=3, generated_tokens=2)
    )
    return Event(batch_index=batch, item_finished=finished)


async def two_tokens_each(
    request: router_pb2.GenerateRequest, context: Any
) -> AsyncIterator[router_pb2.GenerateResponse]:
    batches = range(len(request.items))
    yield response(accepted(request))
    yield response(*(tokens(batch, 0, [batch], "a") for batch in batches))
    yield response(*(tokens(batch, 1, [batch + 10], "b") for batch in batches))
    yield response(*(sequence_finished(batch) for batch in batches))
    yield response(*(item_finished(batch) for batch in batches))


async def one_token_then_silence(
    request: router_pb2.GenerateRequest, context: Any
) -> AsyncIterator[router_pb2.GenerateResponse]:
    yield response(accepted(request), tokens(0, 0, [1], "a"))
    await asyncio.Event().wait()


async def one_token_and_no_time_left(
    request: router_pb2.GenerateRequest, context: Any
) -> AsyncIterator[router_pb2.GenerateResponse]:
    yield response(accepted(request), tokens(0, 0, [1], "a"))
    # As gRPC ends a call whose time is up.
    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
