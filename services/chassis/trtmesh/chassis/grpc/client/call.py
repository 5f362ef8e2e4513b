"""A call on the client, from headers to status."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.fair.limits import Account
from trtmesh.chassis.fair.turns import ConnectionQueue
from trtmesh.chassis.grpc.client.headers import (
    Status,
    parse_response_headers,
    parse_trailers,
    status_of_reset,
)
from trtmesh.chassis.grpc.messages import (
    BadMessage,
    Memory,
    Message,
    MessageReader,
    ReceivedMessages,
    pack_prefix,
)
from trtmesh.chassis.http2.frames import Buffer, ErrorCode, Http2StreamError, rst_stream
from trtmesh.chassis.http2.headers import HeaderBlock
from trtmesh.chassis.http2.writer import FrameWriter, SendStream

ENDED = "the stream ended"

WINDOW_SIZE = 2**21
"""Flow-control window of a call. A link between services is a single call and carries this much per round trip."""


class CallEnded(Unavailable):
    """The server ended the call with OK before receiving a message."""


Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """A method: `/package.Service/Method`, and the functions for the messages."""

    path: str
    serialize: Callable[[Request], bytes]
    parse: Callable[[Any], Response]
    """Takes a Message."""


class Call(ABC, Generic[Request, Response]):
    """A call to a service. The caller ends the call by `cancel`."""

    @abstractmethod
    def write_now(self, request: Request) -> bool:
        """Sends a message, and returns whether: a message that must wait, or the end of the call, needs `write`."""

    @abstractmethod
    async def write(self, request: Request) -> None:
        """Sends a message. Returns once flow control has admitted all bytes. Raises AioRpcError, or CallEnded if the
        call has ended with OK."""

    @abstractmethod
    def half_close(self) -> None:
        """Ends the request; no message follows."""

    @abstractmethod
    async def read(self) -> Response | None:
        """The next message; None if the call ended with OK. Raises AioRpcError for any other status."""

    @abstractmethod
    async def each(self, receive: Callable[[Response], None]) -> None:
        """Passes every message to `receive`, mostly in the pass of the event loop in which it arrives. Returns when the
        call has ended with OK. Raises AioRpcError for any other status, and the error of `receive`."""

    @abstractmethod
    def cancel(self) -> None:
        """Ends the call unless ended, and drops unread messages."""

    def __aiter__(self) -> Call[Request, Response]:
        return self

    async def __anext__(self) -> Response:
        if (response := await self.read()) is None:
            raise StopAsyncIteration
        return response


class Connection(ABC):
    """Opens calls on a server."""

    @abstractmethod
    def open(
        self, method: Method[Request, Response], timeout_seconds: float | None = None
    ) -> Call[Request, Response]:
        """Opens a call, for the caller to cancel in `finally`. The handler learns `timeout_seconds`. Raises
        Unavailable."""

    async def ask(
        self, method: Method[Request, Response], request: Request, timeout_seconds: float
    ) -> Response:
        """Makes a unary call. Raises AioRpcError and Unavailable."""
        call = self.open(method, timeout_seconds)
        try:
            async with asyncio.timeout(timeout_seconds):
                # A server may respond before the end of the request.
                with suppress(CallEnded):
                    await call.write(request)
                call.half_close()
                response = await call.read()
                if response is None or await call.read() is not None:
                    raise Unavailable(f"{method.path} did not return exactly one message")
                return response
        except TimeoutError:
            raise Unavailable(
                f"{method.path} did not respond within {timeout_seconds:g} s"
            ) from None
        finally:
            call.cancel()


class ClientCall(Call[Request, Response]):
    """A call over a connection, open until the status arrives, the connection is lost, or the caller cancels."""

    def __init__(
        self,
        method: Method[Request, Response],
        stream: SendStream,
        writer: FrameWriter,
        send_window_update: Callable[[int], None],
        forget: Callable[[], None],
        max_message_bytes: int,
        queue: ConnectionQueue,
        account: Account,
        window_size: int,
        memory: Memory | None = None,
    ) -> None:
        self._method = method
        self._writer = writer
        self._forget = forget
        self._max_message_bytes = max_message_bytes
        self._reader = MessageReader("identity", max_message_bytes, memory)
        self._responses = ReceivedMessages(
            self._reader, window_size, send_window_update, queue, account
        )
        self.headers_received = False
        self.ended_by_peer = False
        self._half_closed = False
        self._status: Status | None = None
        self.stream = stream

    def write_now(self, request: Request) -> bool:
        if self._status is not None or self._half_closed or self.stream.unsent.size:
            return False
        data = self._method.serialize(request)
        if len(data) > self._max_message_bytes:
            return False
        return self._writer.send_whole(self.stream, pack_prefix(0, len(data)), data)

    async def write(self, request: Request) -> None:
        data = self._method.serialize(request)
        if len(data) > self._max_message_bytes:
            raise as_error(
                Status(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the message has {len(data)} bytes but must have at most {self._max_message_bytes}",
                )
            )
        writer, stream = self._writer, self.stream
        if stream.unsent.size:
            await writer.drain(stream)
        if self._status is not None or self._half_closed:
            self._check_open()
        writer.send_data(stream, pack_prefix(0, len(data)), data)
        if stream.unsent.size:
            await writer.drain(stream)
            self._check_open()

    def half_close(self) -> None:
        if self._status is None and not self._half_closed:
            self._half_closed = True
            self._writer.end_stream(self.stream)

    async def read(self) -> Response | None:
        responses = self._responses
        try:
            data = None if await responses.arrived() is None else responses.take()
        except BadMessage as error:
            raise self._broken(error) from error
        if data is None:
            self._check_status()
            return None
        try:
            return self._method.parse(data)
        except Exception as error:
            raise _unreadable(error) from error

    async def each(self, receive: Callable[[Response], None]) -> None:
        parse = self._method.parse

        def take(data: Message) -> None:
            try:
                response = parse(data)
            except Exception as error:
                raise _unreadable(error) from error
            receive(response)

        responses = self._responses
        try:
            with responses.handing_over(take, self._max_message_bytes):
                while await responses.arrived() is not None:
                    take(responses.take())
        except BadMessage as error:
            raise self._broken(error) from error
        self._check_status()

    def _broken(self, error: BadMessage) -> grpc.aio.AioRpcError:
        """Ends the call after a bad message. Returns the error, unless the call has ended with another: raises that."""
        self._check_status()
        bad = Status(error.status, str(error))
        if self._status is None:
            self._reset(ErrorCode.CANCEL, bad)
        return as_error(bad)

    def cancel(self) -> None:
        if self._status is None:
            cancelled = Status(grpc.StatusCode.CANCELLED, "the call was cancelled")
            self._reset(ErrorCode.CANCEL, cancelled)
        self._responses.drop()

    def receive_header_block(self, block: HeaderBlock) -> None:
        """Takes headers or trailers. Raises Http2StreamError."""
        self.ended_by_peer = block.end_stream
        if self._status is not None:
            return
        if self.headers_received:
            if not block.end_stream:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
            self._end(parse_trailers(block.fields))
            return
        headers = parse_response_headers(block.fields)
        if headers is None:
            if block.end_stream:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "1xx headers with END_STREAM")
            return
        if isinstance(headers, Status):
            if block.end_stream:
                self._end(headers)
            else:
                self._reset(ErrorCode.CANCEL, headers)
            return
        self.headers_received = True
        self._reader.encoding = headers.encoding
        if block.end_stream:
            self.receive_end_stream()

    @property
    def held(self) -> int:
        return self._responses.held

    def shed(self) -> None:
        if self._status is None:
            held = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many unread bytes are held")
            self._reset(ErrorCode.CANCEL, held)
        self._responses.drop()

    @property
    def room(self) -> memoryview | None:
        """Memory for the next bytes of a large message."""
        return self._responses.room if self._status is None else None

    def receive_data(self, data: Buffer, flow_size: int) -> None:
        if self._status is not None:
            return
        if not self.headers_received:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "DATA before HEADERS")
        try:
            self._responses.feed(data, flow_size)
        except BadMessage as error:
            self._reset(ErrorCode.CANCEL, Status(error.status, str(error)))

    def receive_end_stream(self) -> None:
        self.ended_by_peer = True
        if self._status is None:
            self._end(Status(grpc.StatusCode.INTERNAL, "the call ended without grpc-status"))

    def fail(self, code: ErrorCode) -> None:
        if self._status is None:
            broken = Status(grpc.StatusCode.INTERNAL, "the server violated HTTP/2")
            self._reset(code, broken)

    def receive_rst_stream(self, code: ErrorCode) -> None:
        self.ended_by_peer = True
        if self._status is None:
            self._half_closed = True
            self._end(status_of_reset(code))

    def disconnect(self, reason: str) -> None:
        """The connection is lost, or the server does not process the call after its GOAWAY."""
        if self._status is None:
            self._half_closed = True
            self._end(Status(grpc.StatusCode.UNAVAILABLE, reason))

    def _reset(self, code: ErrorCode, status: Status) -> None:
        self._half_closed = True
        self._end(status)
        self._writer.send(rst_stream(self.stream.stream_id, code))

    def _end(self, status: Status) -> None:
        self._status = status
        self._responses.end()
        self._writer.drop_unsent(self.stream)
        if not self._half_closed:
            # Without END_STREAM from this side the stream would stay open.
            self._writer.send(rst_stream(self.stream.stream_id, ErrorCode.NO_ERROR))
        self._forget()

    def _check_open(self) -> None:
        self._check_status()
        if self._status is not None:
            raise CallEnded(ENDED)
        if self._half_closed:
            raise grpc.aio.UsageError("the call was half-closed")

    def _check_status(self) -> None:
        """Raises the status of the call unless OK or still missing."""
        if self._status is not None and self._status.code is not grpc.StatusCode.OK:
            raise as_error(self._status)


def _unreadable(error: Exception) -> grpc.aio.AioRpcError:
    """What a message is that its parser takes for broken. Parsers raise anything."""
    return as_error(Status(grpc.StatusCode.INTERNAL, f"a message cannot be parsed: {error}"))


def as_error(status: Status) -> grpc.aio.AioRpcError:
    """Returns the error raised by grpc.aio for a status."""
    return grpc.aio.AioRpcError(
        status.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*status.metadata),
        details=status.details,
    )
