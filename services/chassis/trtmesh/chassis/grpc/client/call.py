"""One call, from its headers to its status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc.client.headers import Status, parse_head, parse_trailers, status_of_reset
from trtmesh.chassis.grpc.messages import BadMessage, MessageReader
from trtmesh.chassis.http2.frames import ErrorCode, StreamFailed, reset
from trtmesh.chassis.http2.headers import HeaderBlock
from trtmesh.chassis.http2.input import Input
from trtmesh.chassis.http2.writer import Output, OutStream

ENDED = "its stream ended"

WINDOW_BYTES = 2**21
"""What a server may send ahead on a call. A link is one call, so this is what it carries in a round trip."""


class Ended(Unavailable):
    """The server ended a call, with OK, before it took a message."""


Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """What is called: `/package.Service/Method`, how its requests are written, and how its answers are read."""

    path: str
    serialise: Callable[[Request], bytes]
    parse: Callable[[bytes], Response]


class ClientCall(Generic[Request, Response]):
    """A call that is open until its status comes, it is cancelled, or its connection is gone. Whoever opens it cancels
    it in the end."""

    def __init__(
        self,
        method: Method[Request, Response],
        stream: OutStream,
        output: Output,
        grant: Callable[[int], None],
        forget: Callable[[], None],
        most_message_bytes: int,
    ) -> None:
        self._method = method
        self._output = output
        self._forget = forget
        self._most_bytes = most_message_bytes
        self._reader = MessageReader("identity", most_message_bytes)
        self._input = Input(self._reader, WINDOW_BYTES, grant)
        self._begun = False
        self._half_closed = False
        self._status: Status | None = None
        self.stream = stream

    async def write(self, request: Request) -> None:
        """Sends a message; returns when the server's windows took all of it. Raises AioRpcError, or Ended where the
        call has ended with OK."""
        data = self._method.serialise(request)
        if len(data) > self._most_bytes:
            raise _as_error(
                Status(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the message has {len(data)} bytes, and at most {self._most_bytes} are sent",
                )
            )
        output, stream = self._output, self.stream
        if stream.unsent:
            await output.drain(stream)
        self._check_open()
        output.send(stream, data)
        if stream.unsent:
            await output.drain(stream)
            self._check_open()

    def half_close(self) -> None:
        """Says that no message follows."""
        if self._status is None and not self._half_closed:
            self._half_closed = True
            self._output.half_close(self.stream)

    async def read(self) -> Response | None:
        """The next message; None where the call ended with OK. Raises AioRpcError for another status."""
        try:
            data = await self._input.next()
        except BadMessage as error:
            self._check_status()
            raise _as_error(Status(error.status, str(error))) from error
        if data is None:
            self._check_status()
            return None
        try:
            return self._method.parse(data)
        except Exception as error:
            # Broad on purpose: whatever a message cannot be read for, the caller is told.
            raise _as_error(
                Status(grpc.StatusCode.INTERNAL, f"a message cannot be read: {error}")
            ) from error

    def __aiter__(self) -> ClientCall[Request, Response]:
        return self

    async def __anext__(self) -> Response:
        if (response := await self.read()) is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Ends the call, unless it has ended."""
        if self._status is None:
            cancelled = Status(grpc.StatusCode.CANCELLED, "it was cancelled")
            self._break_off(ErrorCode.CANCEL, cancelled)

    def take_block(self, block: HeaderBlock) -> None:
        """Takes headers or trailers. Raises StreamFailed."""
        if self._status is not None:
            return
        if self._begun:
            if not block.ends_stream:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "headers came behind data")
            self._end(parse_trailers(block.fields))
            return
        head = parse_head(block.fields)
        if head is None:
            if block.ends_stream:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "nothing follows what announces more")
            return
        if isinstance(head, Status):
            if block.ends_stream:
                self._end(head)
            else:
                self._break_off(ErrorCode.CANCEL, head)
            return
        self._begun = True
        self._reader.encoding = head.encoding
        if block.ends_stream:
            self.half_closed()

    def take(self, size: int, data: bytes) -> None:
        """Takes the payload of a frame that counts `size` bytes. Raises StreamFailed."""
        if self._status is not None:
            return
        if not self._begun:
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "data came before headers")
        try:
            self._input.take(size, data)
        except BadMessage as error:
            self._break_off(ErrorCode.CANCEL, Status(error.status, str(error)))

    def half_closed(self) -> None:
        """The server ended the call and said no status."""
        if self._status is None:
            self._end(Status(grpc.StatusCode.INTERNAL, "the call ended without a status"))

    def reset(self, code: ErrorCode) -> None:
        """Ends the call: its server broke a rule."""
        if self._status is None:
            broken = Status(grpc.StatusCode.INTERNAL, "the server broke a rule of HTTP/2")
            self._break_off(code, broken)

    def was_reset(self, code: ErrorCode) -> None:
        """The server has ended the call at once."""
        if self._status is None:
            self._half_closed = True
            self._end(status_of_reset(code))

    def lost(self, why: str) -> None:
        """The server is gone, or does not take the call."""
        if self._status is None:
            self._half_closed = True
            self._end(Status(grpc.StatusCode.UNAVAILABLE, why))

    def _break_off(self, code: ErrorCode, status: Status) -> None:
        self._half_closed = True
        self._end(status)
        self._output.put(reset(self.stream.number, code))

    def _end(self, status: Status) -> None:
        self._status = status
        self._input.end()
        self._output.forget(self.stream)
        if not self._half_closed:
            # The server is done with it and we are not, so it would count as open for ever.
            self._output.put(reset(self.stream.number, ErrorCode.NO_ERROR))
        self._forget()

    def _check_open(self) -> None:
        self._check_status()
        if self._status is not None:
            raise Ended(ENDED)
        if self._half_closed:
            raise grpc.aio.UsageError("the call was closed for writing")

    def _check_status(self) -> None:
        """Raises what the call ended with, where that is no OK."""
        if self._status is not None and self._status.code is not grpc.StatusCode.OK:
            raise _as_error(self._status)


def _as_error(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        status.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*status.metadata),
        details=status.details,
    )
