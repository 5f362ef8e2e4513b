"""Steps common to the generation calls of all doors: names the caller and counts the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from trtmesh.router.admission import key_name
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.live_request import LiveRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """The name of the caller's API key, and the seconds until the call's deadline; None without a deadline."""

    api_key: str
    remaining_seconds: float | None


def metadata_of(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    """The textual metadata of a gRPC call."""
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """The caller of a gRPC call."""
    return Caller(key_name(metadata_of(context)), context.time_remaining())


class GenerationCall:
    """A client's call from its arrival to its outcome."""

    def __init__(self) -> None:
        self.outcome = "refused"

    @asynccontextmanager
    async def running(
        self, opening: AbstractAsyncContextManager[LiveRequest]
    ) -> AsyncIterator[LiveRequest]:
        """Runs the call's request inside the block. Raises the error if the router ends the request."""
        async with opening as live:
            self.outcome = "cancelled"
            try:
                yield live
            except asyncio.CancelledError:
                if live.ended is None:
                    raise
                raise live.ended from None
            self.outcome = "complete"


@contextmanager
def counted(metrics: RouterMetrics) -> Iterator[GenerationCall]:
    """Counts a call by its outcome: refused, cancelled or complete."""
    call = GenerationCall()
    try:
        yield call
    finally:
        metrics.requests[call.outcome] += 1
