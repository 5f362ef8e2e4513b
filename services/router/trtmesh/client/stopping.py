"""Stopping a request that one of several routers has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import DeadlineExceeded, TrtmeshError, Unavailable
from trtmesh.client.connection import Connection, typed_errors
from trtmesh.v1 import router_pb2, router_pb2_grpc


@dataclass(frozen=True, slots=True)
class Stopped:
    """What routers said to a stop: items that one of them stopped, and which of them said nothing, and why."""

    items: int
    silent: dict[int, TrtmeshError]


async def stop_anywhere(
    routers: Sequence[Connection], request: router_pb2.StopRequest, timeout_seconds: float | None
) -> Stopped:
    """Asks all routers at once and waits for no other as soon as one of them stopped something. Raises what a router
    that was reached has against the call."""
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
    router: Connection, request: router_pb2.StopRequest, timeout_seconds: float | None
) -> int:
    with typed_errors():
        stub = router_pb2_grpc.MeshServiceStub(router.channel)
        answer = await stub.Stop(request, timeout=timeout_seconds)
    return int(answer.stopped_items)
