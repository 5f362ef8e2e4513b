"""Calls as their handlers see them, and the statuses of their errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
from trtmesh.chassis.error_wire import Metadata, to_metadata
from trtmesh.chassis.errors import InternalError, TrtmeshError, Unavailable
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.chassis.forwarding import Receive
from trtmesh.chassis.logs import Occasionally

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a failed call ends."""

    status: grpc.StatusCode
    details: str
    metadata: Metadata = ()

    @classmethod
    def of(cls, error: BaseException, sentence: str | None = None) -> Refusal:
        """Returns the status, sentence and data of a TrtmeshError, and logs it at a bounded rate. Any other error is a
        defect: logged with a traceback, and INTERNAL."""
        if isinstance(error, TrtmeshError):
            sentence = str(error) if sentence is None else sentence
            # Peers retry an unavailable service all the time.
            level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
            occasionally(error.reason, level, "call refused: %s: %s", error.reason, sentence)
            return cls(error.row.status, sentence, to_metadata(error))
        log.error("unexpected error in a call", exc_info=error)
        defect = InternalError(f"{type(error).__name__}: {error}")
        return cls(defect.row.status, str(defect), to_metadata(defect))


async def refuse(context: RpcContext, error: TrtmeshError, sentence: str) -> NoReturn:
    """Ends a call with an error in words of its own; errors that a handler raises end it in the native API's."""
    refusal = Refusal.of(error, sentence)
    context.set_trailing_metadata(refusal.metadata)
    await context.abort(refusal.status, refusal.details)
