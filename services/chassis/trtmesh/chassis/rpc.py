"""The frame of every RPC handler: binds the request id and turns errors into statuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, NoReturn, Protocol

import grpc
from trtmesh.chassis.error_wire import to_metadata
from trtmesh.chassis.errors import InternalError, TrtmeshError, Unavailable
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.chassis.forwarding import Receive
from trtmesh.chassis.logs import Occasionally, rebind_request_id
from trtmesh.chassis.panics import is_failure

log = logging.getLogger(__name__)
occasionally = Occasionally(log)

REQUEST_ID_METADATA_KEY = "x-request-id"


class RpcContext(Protocol):
    """A call, as seen by the handler."""

    def invocation_metadata(self) -> Any:
        """Returns the metadata sent by the client."""

    def peer(self) -> str:
        """Returns the client's address in gRPC's form."""

    def auth_context(self) -> Mapping[str, Any]:
        """Returns the client's identity by certificate; empty without a certificate."""

    def time_remaining(self) -> Any:
        """Seconds until the deadline; None without a deadline."""

    async def read(self) -> Any:
        """The next request message, or grpc.aio.EOF."""

    async def write(self, message: Any) -> None:
        """Sends a message. Returns once flow control has admitted all bytes."""

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Sends metadata with the status."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Ends the call with a status other than OK. Always raises AbortError."""


class ServedContext(RpcContext, Protocol):
    """A call of this server, with more than gRPC's usual interface."""

    @property
    def message(self) -> ReceivedMessage:
        """The latest message of the handler."""

    async def each(self, receive: Receive[Any]) -> None:
        """Passes every request message to `receive`, mostly in the pass of the event loop in which it arrives. Raises
        the error of `receive`."""

    @property
    def half_closed(self) -> bool:
        """Whether the client sent its last message, and the handler has it."""

    def write_now(self, message: Any) -> bool:
        """Sends a message, and returns whether: a message that must wait, or the end of the call, needs `write`."""

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Sends metadata before the first message."""

    async def write_pieces(self, *pieces: bytes | bytearray | memoryview) -> None:
        """Sends a large serialized message in pieces, without a copy."""


def request_id_of(context: RpcContext) -> str:
    """The request id in the call's metadata, or ''."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_METADATA_KEY:
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


class answering(AbstractAsyncContextManager[None]):  # noqa: N801 - as the context managers of contextlib
    """Wraps a handler's body, in the handler's own task. A TrtmeshError ends the call with the error's status, sentence
    and data. Any other exception is logged with a traceback and ends the call with INTERNAL.

    A class, because an asynchronous generator costs as much as parsing the request.
    """

    def __init__(
        self,
        context: RpcContext,
        request_id: str = "",
        sentence: Callable[[TrtmeshError], str] = str,
    ) -> None:
        self._context, self._sentence = context, sentence
        rebind_request_id(request_id or request_id_of(context))

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, _: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, TrtmeshError):
            await _abort(self._context, error, self._sentence(error))
        elif error and is_failure(error) and not isinstance(error, grpc.aio.AbortError):
            # A defect must reach the client as a status, not as a broken connection.
            log.error("unexpected error in a call", exc_info=error)
            defect = InternalError(f"{type(error).__name__}: {error}")
            await _abort(self._context, defect, defect.message)


async def _abort(context: RpcContext, error: TrtmeshError, sentence: str) -> None:
    # Peers retry an unavailable service all the time.
    level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
    occasionally(error.reason, level, "call refused: %s: %s", error.reason, sentence)
    metadata = to_metadata(error)
    context.set_trailing_metadata(metadata)
    await context.abort(error.row.status, sentence)
