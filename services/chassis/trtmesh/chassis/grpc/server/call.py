"""A call on the server: runs the handler in a task."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor
from trtmesh.chassis.errors import forget_frames
from trtmesh.chassis.fair.limits import Account
from trtmesh.chassis.fair.messages import LARGE_BYTES, MessageAdmission, ReceivedMessage
from trtmesh.chassis.fair.turns import StartQueue
from trtmesh.chassis.forwarding import Receive, Rest
from trtmesh.chassis.grpc.large_message import MessageLimits, parse_in_steps
from trtmesh.chassis.grpc.messages import (
    BadMessage,
    Message,
    MessageReader,
    ReceivedMessages,
    pack_prefix,
)
from trtmesh.chassis.grpc.metadata import Metadata, metadata_block
from trtmesh.chassis.grpc.server.compression import Compressor
from trtmesh.chassis.grpc.server.headers import (
    RequestHeaders,
    check_trailers,
    response_headers,
    trailers,
)
from trtmesh.chassis.http2.connection import H, Http2Connection
from trtmesh.chassis.http2.frames import INITIAL_WINDOW_SIZE, Buffer, ErrorCode, Http2StreamError
from trtmesh.chassis.http2.headers import HeaderBlock
from trtmesh.chassis.http2.writer import MAX_BULK_DATA_SIZE, SendStream
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.chassis.panics import is_failure
from trtmesh.chassis.rpc import Refusal, request_id_of
from trtmesh.chassis.tls.identity import CertificateNames

READING_SECONDS = 0.001
"""Time for the messages of a call already received; then other calls have their turn."""

REQUEST_SECONDS = 60.0
"""Limit for a client to send a single request, looked at every few seconds."""

CLIENTS_FAULTS = frozenset(
    (
        *(
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.UNIMPLEMENTED,
        ),
        *(grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED),
    )
)
"""Statuses that blame the client. A server without room is not the fault of a client."""

HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
"""Clients may keep calls of this method open for any time."""

UNREAD_SECONDS = 120.0
"""Longest time in which a client reads nothing of an answer that was given whole, though it answers PINGs; then the
stream is reset. Streams of tokens have a limit of the router's own."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """Rules of a server for all calls."""

    max_message_bytes: int
    compressor: Compressor
    message_limits: MessageLimits | None
    """None for trusted clients."""
    admission: MessageAdmission


class CallConnection(Http2Connection[H]):
    """A connection, as seen by calls. The account has the bytes of requests not yet read by handlers."""

    policy: CallPolicy
    starts: StartQueue
    unread: Account
    """Bytes of answers not yet read by the client."""
    idle: Account
    """Calls waiting for the client."""
    identity: CertificateNames | None

    @abstractmethod
    def count_failure(self) -> None:
        """Counts a call that failed by a fault of the client."""


class ServerCall:
    """A call from headers to trailers.

    The handler starts in turn, and not before a single request is complete: a call reset until then costs no more than
    the headers.
    """

    def __init__(
        self,
        headers: RequestHeaders,
        handler: Handler,
        stream: SendStream,
        connection: CallConnection[Any],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._metadata = headers.metadata
        self.stream = stream
        self._connection = connection
        self._policy = policy = connection.policy
        self._writer = connection.writer
        self._requests = ReceivedMessages(
            MessageReader(headers.encoding, policy.max_message_bytes),
            INITIAL_WINDOW_SIZE,
            partial(connection.send_window_update, stream.stream_id),
            connection.queue,
            connection.account,
        )
        self._checking = 0
        """Bytes of messages that are being parsed, or wait to be read."""
        self._message_bytes = 0
        """Bytes of the latest message of the handler. Measuring a parsed message takes as long as serialising."""
        self._unread_counted = 0
        self._only_listens = headers.path == HEALTH_WATCH
        self._incomplete = False
        """Whether the request is incomplete."""
        self._readers_awaited = 0
        """Number of blocks waiting for the client to read."""
        self.idle = False
        """Whether the call counts as waiting for the client."""
        self._encoding = policy.compressor.encoding_of(headers)
        """grpc-encoding of the answers."""
        self._max_plain_bytes = min(
            policy.max_message_bytes, policy.compressor.most_plain_bytes(self._encoding)
        )
        self._compressing = 0
        """Bytes of a message in compression."""
        self._deadline = None if headers.timeout is None else self._loop.time() + headers.timeout
        self._content_missing = headers.content_length
        """Bytes of the request announced and not sent. None without a content-length."""
        self._headers_sent = False
        self._ended = False
        self._reset_by_peer = False
        self._task: asyncio.Task[None] | None = None
        self._task_runs = False
        self._asked = handler.request_streaming
        """Whether the call waits for its first turn, or had it."""
        self._turn: asyncio.Future[None] | None = None
        """Done when the handler may read on."""
        self._reads_since = 0.0
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing = b""
        self._timer = None if self._deadline is None else self._start_deadline(self._deadline)
        self._opened_at = self._loop.time()
        if handler.request_streaming:
            connection.starts.add(self)

    @property
    def ended_by_peer(self) -> bool:
        return self._requests.ended or self._reset_by_peer

    @property
    def held(self) -> int:
        return self._requests.held + self._checking

    @property
    def unread(self) -> int:
        """Bytes of answers not yet read by the client."""
        return self.stream.unsent.size + self._compressing

    def shed(self) -> None:
        self.end_with(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "the server holds too many unread bytes of its clients; send the request again later",
        )

    def receive_data(self, data: Buffer, flow_size: int) -> None:
        if self._ended:
            if self.ended_by_peer:
                raise Http2StreamError(ErrorCode.STREAM_CLOSED, "DATA after the stream's end")
            return
        if not flow_size and not self._requests.ended:
            # Most clients end the request with an empty frame.
            return
        if self._content_missing is not None:
            self._content_missing -= len(data)
            if self._content_missing < 0:
                raise _wrong_length()
        try:
            self._requests.feed(data, flow_size)
        except BadMessage as error:
            self.end_with(error.status, str(error))
        else:
            if not self._handler.request_streaming and self._requests.several:
                self.end_with(
                    grpc.StatusCode.INTERNAL, "the call has more than one request message"
                )
            if not self._asked:
                self._start_when_complete()

    def wait_for_client(self) -> None:
        """Counts the call as idle until the request, a message or a stream, is complete."""
        self._incomplete = True
        self._count_idle()

    def _be_busy(self) -> None:
        self._incomplete = False
        self._count_idle()

    def _count_idle(self) -> None:
        """Counts the call as idle or not. The account may end this call to make room."""
        idle = self._incomplete or (self._readers_awaited > 0 and self.stream.unsent.size > 0)
        if idle != self.idle:
            self.idle = idle
            self._connection.idle.add(1 if idle else -1)

    def receive_trailers(self, block: HeaderBlock) -> None:
        """Takes the trailers, which end the request. Raises Http2StreamError."""
        if self.ended_by_peer:
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "HEADERS after the stream's end")
        if not block.end_stream:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
        check_trailers(block.fields)
        self.receive_end_stream()

    def receive_end_stream(self) -> None:
        if self._content_missing and not self._ended:
            raise _wrong_length()
        self._requests.end()
        self._start_when_complete()

    def _start_when_complete(self) -> None:
        requests = self._requests
        waiting = requests.waiting
        is_complete = requests.ended or (waiting and not self._handler.request_streaming)
        if is_complete and self._incomplete and not self._only_listens:
            self._be_busy()
        if not self._asked and not self._ended and waiting:
            self._asked = True
            self._connection.starts.add(self)

    def end_if_overdue(self) -> None:
        """Ends a call if the single request takes too long to arrive."""
        if self._handler.request_streaming or self._task or self._requests.waiting:
            return
        if self._loop.time() - self._opened_at > REQUEST_SECONDS:
            self.end_with(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the request was not complete within {REQUEST_SECONDS:g} s",
            )

    def proceed(self) -> None:
        """Starts the handler, or lets the handler read on; after the end of the call, cancels the handler."""
        if self._task is None:
            self._task = self._loop.create_task(self._run())
            self._task.add_done_callback(self._over)
        elif self._turn is not None and not self._ended:
            # In this pass the handler's own task may have been cancelled.
            if not self._turn.done():
                self._turn.set_result(None)
            self._turn = None
        else:
            self._task.cancel()

    def end_with(self, status: grpc.StatusCode, details: str) -> None:
        """Ends the call and cancels the handler."""
        if not self._ended:
            self._end(status, details)
            self._stop_handler()

    def fail(self, code: ErrorCode) -> None:
        self._cancel()
        self._writer.reset_stream(self.stream, code)

    def disconnect(self, reason: str) -> None:
        self._cancel()

    def receive_rst_stream(self, code: ErrorCode) -> None:
        self._reset_by_peer = True
        self._cancel()

    def _cancel(self) -> None:
        """Cancels the handler, unless the call has ended already and the handler cleans up."""
        self._writer.drop_unsent(self.stream)
        self._count_idle()
        if not self._ended:
            self._ended = True
            self._forget_requests()
            self._stop_handler()

    def _forget_requests(self) -> None:
        """Nobody reads them after the end of the call."""
        if self._incomplete:
            self._be_busy()
        self._requests.drop()

    async def read(self) -> Any:
        """The next request message, or grpc.aio.EOF."""
        try:
            size = await self._arrived()
            return grpc.aio.EOF if size is None else await self._message(size)
        except BadMessage as error:
            await self.abort(error.status, str(error))

    async def each(self, receive: Receive[Any]) -> None:
        """Passes every request message to `receive`, mostly in the pass of the event loop in which it arrives. Raises
        the error of `receive`."""

        def take(data: Message) -> Rest | None:
            return receive(self._parsed(data))

        try:
            with self._requests.handing_over(take, LARGE_BYTES - 1):
                while (size := await self._arrived()) is not None:
                    if (rest := receive(await self._message(size))) is not None:
                        await rest()
        except BadMessage as error:
            await self.abort(error.status, str(error))

    def write_now(self, message: Any) -> bool:
        """Sends a message, and returns whether: a message that must wait, or the end of the call, needs `write`."""
        if self._ended or self.stream.unsent.size:
            return False
        serialize = self._handler.response_serializer
        data: bytes = message if serialize is None else serialize(message)
        if len(data) > self._max_plain_bytes:
            return False
        if not self._headers_sent:
            self._send_headers()
        return self._writer.send_whole(self.stream, pack_prefix(0, len(data)), data)

    async def write(self, message: Any) -> None:
        """Sends a message. Returns once flow control has admitted all bytes. The rest of a cancelled write is sent
        first."""
        if self._ended:
            raise _call_ended()
        serialize = self._handler.response_serializer
        data: bytes = message if serialize is None else serialize(message)
        if len(data) > self._max_plain_bytes:
            await self._write_large(data)
            return
        writer, stream = self._writer, self.stream
        if stream.unsent.size:
            await writer.drain(stream)
            if self._ended:
                raise _call_ended()
        if not self._headers_sent:
            self._send_headers()
        writer.send_data(stream, pack_prefix(0, len(data)), data)
        if stream.unsent.size:
            await self._drain()

    async def _write_large(self, data: bytes) -> None:
        """Sends a message, possibly compressed. Ends the call if the message is too large."""
        if len(data) > self._policy.max_message_bytes:
            await self._refuse_size(len(data))
        pieces = await self._compressed(data)
        await self._ready_to_send()
        writer, stream = self._writer, self.stream
        if pieces is None:
            writer.send_data(stream, pack_prefix(0, len(data)), data)
        else:
            writer.send_pieces(stream, (pack_prefix(1, sum(map(len, pieces))), *pieces))
        if stream.unsent.size:
            await self._drain()

    async def _compressed(self, data: bytes) -> list[bytes] | None:
        """Returns the pieces of the compressed message, or None to send the message uncompressed. Counts the message as
        unread meanwhile."""
        if self._encoding == "identity":
            return None
        self._compressing = len(data)
        self._count_unread()
        try:
            return await self._policy.compressor.compress(data, self._encoding)
        finally:
            self._compressing = 0
            self._count_unread()

    async def write_pieces(self, *pieces: Buffer) -> None:
        """Sends a large serialized message in pieces, neither joined nor compressed, in frames as large as the peer
        admits. Later changes of their memory may arrive at the peer. Otherwise like `write`."""
        if self._ended:
            raise _call_ended()
        size = sum(map(len, pieces))
        if size > self._policy.max_message_bytes:
            await self._refuse_size(size)
        await self._ready_to_send()
        writer, stream = self._writer, self.stream
        stream.max_data_size = MAX_BULK_DATA_SIZE
        writer.send_pieces(stream, (pack_prefix(0, size), *pieces))
        if stream.unsent.size:
            await self._drain()

    async def _ready_to_send(self) -> None:
        """Waits until the rest of a cancelled write is sent, and sends the headers if they are missing."""
        if self._ended:
            raise _call_ended()
        if self.stream.unsent.size:
            await self._writer.drain(self.stream)
            if self._ended:
                raise _call_ended()
        if not self._headers_sent:
            self._send_headers()

    async def _refuse_size(self, size: int) -> None:
        await self.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"Sent message larger than max ({size} vs. {self._policy.max_message_bytes})",
        )

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        if self._headers_sent or self._ended:
            raise grpc.aio.UsageError("initial metadata was sent already")
        self._send_headers(tuple(initial_metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with a status other than OK. Always raises AbortError."""
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNKNOWN, f"aborted with OK: {details}"
        self._end(code, details)
        raise grpc.aio.AbortError(details)

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the status for an exception of the handler. Generated servicers do so for missing methods."""
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
        return self._connection.peer

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns the client's identity by certificate, in the form of grpc.aio. Empty without a certificate."""
        identity = self._connection.identity
        return {} if identity is None else identity.auth_context()

    async def _run(self) -> None:
        """Handle → send the status → wait until the client has read everything."""
        if self._ended:
            return
        self._task_runs = True
        # Another call's task may have created this one.
        rebind_request_id(request_id_of(self) or "-")
        try:
            await self._connection.starts.turn_if_late()
            self._reads_since = perf_counter()
            await self._handle()
            self._end(self._code, self._details)
        except grpc.aio.AbortError as error:
            self._end(grpc.StatusCode.UNKNOWN, str(error))
            forget_frames(error)
        except BadMessage as error:
            self._end(error.status, str(error))
            forget_frames(error)
        except asyncio.CancelledError:
            self._end(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        except BaseException as error:
            if not is_failure(error):
                raise
            if self._code is grpc.StatusCode.OK:
                refusal = Refusal.of(error)
                self.set_trailing_metadata(refusal.metadata)
                self._code, self._details = refusal.status, refusal.details
            self._end(self._code, self._details)
            forget_frames(error)
        await self._drain_last()

    async def _drain(self) -> None:
        """Waits until the client reads the rest. The rest counts as unread until then."""
        self._count_unread()
        try:
            if self._handler.response_streaming:
                # The handler decides how long to wait.
                with self._waiting_for_client():
                    await self._writer.drain(self.stream)
            else:
                await self._drain_last()
        finally:
            self._count_unread()

    @contextmanager
    def _waiting_for_client(self) -> Iterator[None]:
        """The block of waiting for the client to read. A call with an unread answer costs more than the bytes."""
        self._readers_awaited += 1
        self._count_idle()
        try:
            yield
        finally:
            self._readers_awaited -= 1
            self._count_idle()

    async def _drain_last(self) -> None:
        """Waits until the client reads the last bytes. Resets the stream if the client reads nothing for long."""
        unsent = self.stream.unsent
        while size := unsent.size:
            with suppress(TimeoutError), self._waiting_for_client():
                async with asyncio.timeout(UNREAD_SECONDS):
                    await self._writer.drain(self.stream)
            if unsent.size == size:
                self.fail(ErrorCode.CANCEL)

    def _count_unread(self) -> None:
        """Counts the unsent bytes. The account may end this call to make room."""
        if change := self.unread - self._unread_counted:
            self._unread_counted += change
            self._connection.unread.add(change)

    def _over(self, task: asyncio.Task[None] | None = None) -> None:
        """Neither the client nor a handler is left."""
        if self.stream.unsent.size or self._unread_counted:
            self._writer.drop_unsent(self.stream)
            self._count_unread()
        if self._timer is not None:
            self._timer.cancel()
        self._connection.forget(self.stream.stream_id)

    def _start_deadline(self, deadline: float) -> asyncio.TimerHandle:
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        return self._loop.call_at(deadline, self.end_with, late, "Deadline Exceeded")

    async def _handle(self) -> None:
        handler = self._handler
        given = self._iterate() if handler.request_streaming else await self._single_request()
        answer = function_of(handler)(given, self)
        # How long a message lives is the handler's matter.
        del given
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
        try:
            while (size := await self._arrived()) is not None:
                yield await self._message(size)
        except BadMessage as error:
            # The handler sees the end of the call: the error is the client's.
            await self.abort(error.status, str(error))

    async def _arrived(self) -> int | None:
        """Waits for the next message, and for another turn after a while of messages already received. Returns the
        size, or None after the last message."""
        requests = self._requests
        if requests.complete:
            if perf_counter() - self._reads_since > READING_SECONDS:
                await self._another_turn()
                self._reads_since = perf_counter()
            return await requests.arrived()
        size = await requests.arrived()
        self._reads_since = perf_counter()
        return size

    async def _another_turn(self) -> None:
        self._turn = turn = self._loop.create_future()
        self._connection.starts.add(self)
        try:
            await turn
        except asyncio.CancelledError:
            self._turn = None
            self._connection.starts.remove(self)
            raise

    async def _single_request(self) -> Any:
        if (size := await self._requests.arrived()) is None:
            raise BadMessage(grpc.StatusCode.UNIMPLEMENTED, "the call has no request message")
        return await self._message(size)

    async def _message(self, size: int) -> Any:
        """Returns the next message. A large message stays serialized, and counts as unread, until the backlog has room;
        then the message is parsed in turns. Raises BadMessage."""
        self._message_bytes = size
        if size < LARGE_BYTES or (descriptor := self._descriptor) is None:
            return self._parsed(self._requests.take())
        await self._policy.admission.backlog.enter(size)
        try:
            # If the call has ended meanwhile, the message is gone.
            if self._ended:
                raise _call_ended()
            data = self._requests.take()
            steps = parse_in_steps(data, descriptor, self._parsed, self._policy.message_limits)
            # Freed right after parsing.
            del data
            with self._holding(size):
                return await self._connection.queue.run(steps)
        finally:
            self._policy.admission.backlog.leave(size)

    @property
    def _descriptor(self) -> Descriptor | None:
        """The type of a request message. None for handlers with their own parser."""
        kind = getattr(self._handler.request_deserializer, "__self__", None)
        return getattr(kind, "DESCRIPTOR", None)

    @property
    def message(self) -> ReceivedMessage:
        """The latest message of the handler."""
        return ReceivedMessage(self._policy.admission, self._message_bytes, self._unread)

    @property
    def half_closed(self) -> bool:
        """Whether the client sent its last message, and the handler has it."""
        return self._requests.ended and not self._requests.complete

    @contextmanager
    def _unread(self, size: int) -> Iterator[None]:
        """The block during which a message of `size` bytes, already with the handler, still counts as unread and delays
        the parsing of others."""
        self._policy.admission.backlog.add(size)
        try:
            with self._holding(size):
                yield
        finally:
            self._policy.admission.backlog.leave(size)

    @contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        self._checking += size
        self._connection.account.add(size)
        try:
            yield
        finally:
            self._connection.account.add(-size)
            self._checking -= size

    def _parsed(self, data: Message) -> Any:
        # A copy of a large message would count nowhere; protobuf reads arrays, too.
        read: Any = self._handler.request_deserializer
        if read is None:
            return bytes(data)
        try:
            return read(bytes(data) if isinstance(data, memoryview) else data)
        except Exception as error:
            # Deserializers raise anything.
            raise BadMessage(
                grpc.StatusCode.INTERNAL, f"Exception deserializing request! {error}"
            ) from error

    def _send_headers(self, metadata: Metadata = ()) -> None:
        self._headers_sent = True
        self._connection.rates.note_served()
        self._writer.send_headers(self.stream, response_headers(metadata, self._encoding))

    def _end(self, status: grpc.StatusCode, details: str) -> None:
        """Sends the status unless the call has ended."""
        if self._ended:
            return
        block = trailers(status, details, self._trailing)
        self._ended = True
        self._forget_requests()
        if not self._headers_sent:
            block = response_headers() + block
        self._writer.send_trailers(self.stream, block, reset=not self._requests.ended)
        if status is not grpc.StatusCode.OK and status in CLIENTS_FAULTS:
            self._connection.count_failure()

    def _stop_handler(self) -> None:
        """Cancels the handler in turn. A task before the first step will notice the end of the call: cancelling would
        leave a cycle of task, error and call."""
        if self._task is None:
            self._connection.starts.remove(self)
            self._over()
        elif self._task_runs:
            self._connection.starts.add(self)


def _call_ended() -> asyncio.CancelledError:
    return asyncio.CancelledError("the call has ended")


def _wrong_length() -> Http2StreamError:
    return Http2StreamError(ErrorCode.PROTOCOL_ERROR, "content-length is not the request's size")


def function_of(handler: Handler) -> Callable[[Any, Any], Any]:
    """The function of a handler, which takes the request, or an iterator over requests, and the context."""
    found: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    function: Callable[[Any, Any], Any] = found
    return function
