"""Steps common to the generation calls of all doors: names the caller and counts the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from trtmesh.chassis.logs import rebind_caller
from trtmesh.chassis.tls.identity import COMMON_NAME, SUBJECT_ALTERNATIVE_NAME
from trtmesh.router.callers.callers import Callers
from trtmesh.router.callers.identity import Identity
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.live_request import LiveRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and the seconds until the call's deadline; None without a deadline."""

    identity: Identity
    remaining_seconds: float | None


def identity_of(callers: Callers, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
    """Who makes a gRPC call; its log lines say so too. Raises Unauthenticated, even in a call that was admitted: keys
    expire and are revoked."""
    metadata = context.invocation_metadata() or ()
    identity = callers.identify(metadata, _certificate_of(context))
    rebind_caller(identity.name)
    return identity


def _certificate_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The first name of the client's certificate, or ''."""
    known = context.auth_context()
    for kind in (COMMON_NAME, SUBJECT_ALTERNATIVE_NAME) if known else ():
        for name in known[kind]:
            return name.decode()
    return ""


def caller_of(callers: Callers, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """The caller of a gRPC call. Raises Unauthenticated."""
    return Caller(identity_of(callers, context), context.time_remaining())


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
