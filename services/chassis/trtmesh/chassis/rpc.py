"""The frame of every RPC handler: binds the request id and turns errors into statuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, cast

import grpc
from trtmesh.chassis.error_wire import to_metadata
from trtmesh.chassis.errors import InternalError, TrtmeshError, Unavailable
from trtmesh.chassis.logs import Occasionally, request_id_bound
from trtmesh.chassis.panics import is_failure

log = logging.getLogger(__name__)
occasionally = Occasionally(log)

REQUEST_ID_METADATA_KEY = "x-request-id"


def request_id_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The request id in the call's metadata, or ''."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_METADATA_KEY:
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


def message_bytes_of(context: grpc.aio.ServicerContext[Any, Any]) -> int:
    """Bytes of the message that the handler of a call got last."""
    size: int = cast(Any, context).message_bytes
    return size


def holding_message(
    context: grpc.aio.ServicerContext[Any, Any], size: int
) -> AbstractContextManager[None]:
    """The block in which a message of so many bytes, which the handler of a call got, waits to be read."""
    block: AbstractContextManager[None] = cast(Any, context).holding_message(size)
    return block


class Answering(AbstractAsyncContextManager[None]):
    """The block of a handler's body. A class, because an asynchronous generator costs a call as much as its parsing."""

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        request_id: str,
        sentence: Callable[[TrtmeshError], str],
    ) -> None:
        self._context, self._sentence = context, sentence
        self._bound = request_id_bound(request_id or request_id_of(context))

    async def __aenter__(self) -> None:
        self._bound.__enter__()

    async def __aexit__(
        self, _: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, TrtmeshError):
                await _abort(self._context, error, self._sentence(error))
            elif error and is_failure(error) and not isinstance(error, grpc.aio.AbortError):
                # A defect must reach the client as a status, not as a broken connection.
                log.error("unexpected error in a call", exc_info=error)
                defect = InternalError(f"{type(error).__name__}: {error}")
                await _abort(self._context, defect, defect.message)
        finally:
            self._bound.__exit__()


def answering(
    context: grpc.aio.ServicerContext[Any, Any],
    request_id: str = "",
    sentence: Callable[[TrtmeshError], str] = str,
) -> Answering:
    """Wraps a handler's body. A TrtmeshError ends the call with its status, its sentence and its data; any other
    exception is logged with a traceback and ends the call with INTERNAL."""
    return Answering(context, request_id, sentence)


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: TrtmeshError, sentence: str
) -> None:
    # Peers retry an unavailable service all the time.
    level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
    occasionally(error.reason, level, "call refused: %s: %s", error.reason, sentence)
    metadata = to_metadata(error)
    await context.abort(error.row.status, sentence, trailing_metadata=metadata)
