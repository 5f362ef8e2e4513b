"""A call on the server: runs the handler in a task, with the context interface of grpc.aio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
from trtmesh.chassis.grpc.messages import BadMessage, MessageReader, ReceivedMessages, pack_prefix
from trtmesh.chassis.grpc.metadata import Metadata, metadata_block
from trtmesh.chassis.grpc.server.headers import RequestHeaders, response_headers, trailers
from trtmesh.chassis.http2.frames import INITIAL_WINDOW_SIZE, ErrorCode
from trtmesh.chassis.http2.writer import FrameWriter, SendStream
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.rpc import request_id_of

log = logging.getLogger(__name__)

LINGER_SECONDS = 30.0
"""Limit for a client to read the rest of a response after the end of the call."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ServerCall(grpc.aio.ServicerContext[Any, Any]):
    """A call from headers to trailers."""

    def __init__(
        self,
        headers: RequestHeaders,
        handler: Handler | None,
        stream: SendStream,
        writer: FrameWriter,
        send_window_update: Callable[[int], None],
        peer: str,
        max_message_bytes: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._metadata = headers.metadata
        self._requests = ReceivedMessages(
            MessageReader(headers.encoding, max_message_bytes),
            INITIAL_WINDOW_SIZE,
            send_window_update,
        )
        self._writer = writer
        self._peer = peer
        self._max_message_bytes = max_message_bytes
        self._deadline = None if headers.timeout is None else self._loop.time() + headers.timeout
        self._headers_sent = False
        self._ended = False
        self._started = False
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing = b""
        self.stream = stream
        self.task = self._loop.create_task(self._run())

    def receive_data(self, data: bytes, flow_size: int) -> None:
        if self._ended:
            return
        try:
            self._requests.feed(data, flow_size)
        except BadMessage as error:
            self.end_with(error.status, str(error))

    def receive_end_stream(self) -> None:
        self._requests.end()

    def end_with(self, status: grpc.StatusCode, details: str) -> None:
        """Ends the call and cancels its handler."""
        if not self._ended:
            self._end(status, details)
            self._stop_handler()

    def fail(self, code: ErrorCode) -> None:
        self.receive_rst_stream(code)
        self._writer.reset_stream(self.stream, code)

    def disconnect(self, reason: str) -> None:
        self.receive_rst_stream(ErrorCode.CANCEL)

    def receive_rst_stream(self, code: ErrorCode) -> None:
        """Cancels the handler, unless the call has ended already and the handler cleans up."""
        self._writer.drop_unsent(self.stream)
        if not self._ended:
            self._ended = True
            self._stop_handler()

    async def read(self) -> Any:
        """The next request message, or grpc.aio.EOF."""
        data = await self._requests.next()
        return grpc.aio.EOF if data is None else self._deserialized(data)

    async def write(self, message: Any) -> None:
        """Sends a message; returns when flow control has admitted all of it. The rest of a cancelled write is sent
        first."""
        self._check_open()
        data = self._serialized(message)
        if len(data) > self._max_message_bytes:
            await self.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"Sent message larger than max ({len(data)} vs. {self._max_message_bytes})",
            )
        writer, stream = self._writer, self.stream
        if stream.unsent:
            await writer.drain(stream)
            self._check_open()
        if not self._headers_sent:
            self._send_headers()
        writer.send_data(stream, pack_prefix(0, len(data)), data)
        if stream.unsent:
            await writer.drain(stream)

    def _check_open(self) -> None:
        if self._ended:
            raise asyncio.CancelledError("the call has ended")

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        if self._headers_sent or self._ended:
            raise grpc.aio.UsageError("initial metadata was sent already")
        self._send_headers(tuple(initial_metadata))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """Ends the call with a status other than OK. Always raises AbortError."""
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNKNOWN, f"aborted with OK: {details}"
        if trailing_metadata:
            self.set_trailing_metadata(trailing_metadata)
        self._end(code, details)
        raise grpc.aio.AbortError(details)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = metadata_block(trailing_metadata)

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> Any:
        """Seconds until the deadline; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def set_compression(self, compression: grpc.Compression) -> None:
        raise NotImplementedError("responses are not compressed")

    def disable_next_message_compression(self) -> None:
        """Responses are not compressed."""

    async def _run(self) -> None:
        """Handle → send the status → wait until the client has read it."""
        if self._ended:
            return
        self._started = True
        timer = self._start_deadline()
        try:
            await self._handle()
            self._end(self._code, self._details)
        except grpc.aio.AbortError as error:
            self._end(grpc.StatusCode.UNKNOWN, str(error))
        except BadMessage as error:
            self._end(error.status, str(error))
        except asyncio.CancelledError:
            self._end(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        except Exception as error:
            # A defect must reach the client as a status, not as a broken connection.
            if self._code is grpc.StatusCode.OK:
                with request_id_bound(request_id_of(self)):
                    log.exception("unexpected error in a call")
                self.set_code(grpc.StatusCode.UNKNOWN)
                self.set_details(f"{type(error).__name__}: {error}")
            self._end(self._code, self._details)
        finally:
            if timer is not None:
                timer.cancel()
        await self._linger()

    def _start_deadline(self) -> asyncio.TimerHandle | None:
        if self._deadline is None:
            return None
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        return self._loop.call_at(self._deadline, self.end_with, late, "Deadline Exceeded")

    async def _handle(self) -> None:
        handler = self._handler
        if handler is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        given = self._iterate() if handler.request_streaming else await self._single_request()
        answer = _function_of(handler)(given, self)
        if not hasattr(answer, "__aiter__"):
            response = await answer
            if not handler.response_streaming and self._code is grpc.StatusCode.OK:
                await self.write(response)
            return
        try:
            async for response in answer:
                await self.write(response)
        finally:
            await answer.aclose()

    async def _iterate(self) -> AsyncIterator[Any]:
        while (data := await self._requests.next()) is not None:
            yield self._deserialized(data)

    async def _single_request(self) -> Any:
        if (data := await self._requests.next()) is None:
            raise BadMessage(grpc.StatusCode.UNIMPLEMENTED, "the call has no request message")
        return self._deserialized(data)

    def _deserialized(self, data: bytes) -> Any:
        assert self._handler is not None
        read = self._handler.request_deserializer
        try:
            return data if read is None else read(data)
        except Exception as error:
            # Deserializers raise anything.
            raise BadMessage(
                grpc.StatusCode.INTERNAL, f"Exception deserializing request! {error}"
            ) from error

    def _serialized(self, message: Any) -> bytes:
        assert self._handler is not None
        write = self._handler.response_serializer
        data: bytes = message if write is None else write(message)
        return data

    def _send_headers(self, metadata: Metadata = ()) -> None:
        self._headers_sent = True
        self._writer.send_headers(self.stream, response_headers(metadata))

    def _end(self, status: grpc.StatusCode, details: str) -> None:
        """Sends the status unless the call has ended."""
        if self._ended:
            return
        block = trailers(status, details, self._trailing)
        self._ended = True
        if not self._headers_sent:
            block = response_headers() + block
        self._writer.send_trailers(self.stream, block, reset=not self._requests.ended)

    def _stop_handler(self) -> None:
        """An unstarted task will notice the end of the call; cancelling would leave a cycle of task, error and call."""
        if self._started:
            self.task.cancel()

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                await self._writer.drain(self.stream)
        except TimeoutError:
            self._writer.reset_stream(self.stream, ErrorCode.CANCEL)


def _function_of(handler: Handler) -> Callable[[Any, ServerCall], Any]:
    found: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    function: Callable[[Any, ServerCall], Any] = found
    return function
