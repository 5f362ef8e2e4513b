"""Steps common to the generation calls of all doors: names the caller and counts the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from operator import attrgetter
from time import monotonic
from typing import Self

from trtmesh.chassis.errors import ROW_BY_CLASS, Cancelled, InternalError, TrtmeshError
from trtmesh.chassis.fair.limits import origin_of
from trtmesh.chassis.frozen import frozen
from trtmesh.chassis.logs import rebind_caller
from trtmesh.chassis.rpc import RpcContext
from trtmesh.chassis.tls.identity import COMMON_NAME, SUBJECT_ALTERNATIVE_NAME
from trtmesh.router.callers.callers import Callers, Headers
from trtmesh.router.callers.identity import Identity
from trtmesh.router.metrics import TEXT_COMPLETION, ModelMetrics
from trtmesh.router.requests.context import RequestContext
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.requests.requests import RunningRequest
from trtmesh.router.tracing import CallTrace


class ErrorWording:
    """Says errors in the words of a call, once the call is read."""

    def __init__(self) -> None:
        self.sentence: Callable[[TrtmeshError], str] = attrgetter("message")

    def __call__(self, error: TrtmeshError) -> str:
        return self.sentence(error)


@frozen
class Caller:
    """Who calls, from where, and the seconds until the call's deadline; None without a deadline."""

    identity: Identity
    remaining_seconds: float | None
    origin: str
    """The client's address."""
    headers: Headers
    """Those of the call, or its metadata."""


def identity_of(callers: Callers, context: RpcContext, metadata: Headers) -> Identity:
    """Returns the caller of a gRPC call by its metadata, and adds the name to log lines. Raises Unauthenticated, even
    in an admitted call: keys expire and are revoked."""
    known = context.auth_context()
    identity = callers.identify(metadata, _certificate_of(known) if known else "")
    rebind_caller(identity.name)
    return identity


def _certificate_of(known: Mapping[str, Iterable[bytes]]) -> str:
    """The first name of the client's certificate, or ''."""
    for kind in (COMMON_NAME, SUBJECT_ALTERNATIVE_NAME):
        for name in known[kind]:
            return str(name, "utf-8")
    return ""


def caller_of(callers: Callers, context: RpcContext) -> Caller:
    """The caller of a gRPC call. Raises Unauthenticated."""
    # As gRPC writes addresses: `ipv4:127.0.0.1:50051`, `ipv6:[::1]:50051`.
    host = context.peer().partition(":")[2].rpartition(":")[0].strip("[]")
    metadata = context.invocation_metadata() or ()
    identity = identity_of(callers, context, metadata)
    return Caller(identity, context.time_remaining(), origin_of(host), metadata)


class GenerationCall(AbstractContextManager["GenerationCall"]):
    """The block of a client's call, counted by the outcome: refused before the items ran; failed with any item;
    cancelled by the client, the deadline or this router; or complete."""

    def __init__(
        self,
        door: str,
        metrics: ModelMetrics,
        operation: str = TEXT_COMPLETION,
        began: float | None = None,
        trace: CallTrace | None = None,
    ) -> None:
        """`metrics` are the metrics of the model of the call; `operation` counts until the request runs; `began` is the
        monotonic time of its arrival, by default now."""
        self.metrics = metrics
        self.trace = trace
        self._door, self._operation = door, operation
        self._began = monotonic() if began is None else began
        self.outcome = "refused"
        self.failure = ""
        """The reason word of an item that failed, or of what ended the request."""
        self.context: RequestContext | None = None
        """Of the request, once it runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Counts the call, which ends with an error if any."""
        self.metrics.requests[self._door, self.outcome] += 1
        error_type = self.failure if error is None else self.failure or _error_type(error)
        seconds, context = monotonic() - self._began, self.context
        latencies = (
            self.metrics.latencies[self._operation] if context is None else context.latencies
        )
        trace_id = "" if context is None else context.trace_id
        latencies.request_duration[error_type].observe(seconds, trace_id=trace_id)
        if self.trace is not None:
            self.trace.end(self.outcome, error_type)


def _error_type(error: BaseException) -> str:
    """The reason word of what ended a call. A client that leaves cancels, or breaks the connection."""
    if isinstance(error, TrtmeshError):
        return error.reason
    left = isinstance(error, ConnectionError) or not isinstance(error, Exception)
    return ROW_BY_CLASS[Cancelled if left else InternalError].reason


class RunningCall(AbstractAsyncContextManager[LiveRequest]):
    """The block in which a call's request lives. Raises the error if the router ends the request."""

    def __init__(self, call: GenerationCall, opening: RunningRequest) -> None:
        self._call, self._opening = call, opening
        if call.trace is not None:
            opening.traced(call.trace)

    async def __aenter__(self) -> LiveRequest:
        try:
            self._live = await self._opening.__aenter__()
        except BaseException as error:
            # A door may answer it inside the call's block.
            self._call.failure = _error_type(error)
            raise
        self._call.outcome, self._call.context = "cancelled", self._live.context
        return self._live

    async def __aexit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if failure := self._live.failure:
            self._call.outcome, self._call.failure = "failed", failure
        elif error is None:
            self._call.outcome = "complete"
        # Its end forgets why.
        ended = self._live.ended if isinstance(error, asyncio.CancelledError) else None
        if error is not None and not failure:
            self._call.failure = _error_type(ended or error)
        await self._opening.__aexit__()
        if ended is not None:
            try:
                raise ended from None
            finally:
                # In a cycle the error's frames would keep the request.
                del ended
