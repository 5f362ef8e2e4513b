"""Stops a request on several routers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import DeadlineExceeded, TrtmeshError, Unavailable
from trtmesh.client.channel import ServerChannel, typed_errors
from trtmesh.v1 import router_pb2, router_pb2_grpc


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
