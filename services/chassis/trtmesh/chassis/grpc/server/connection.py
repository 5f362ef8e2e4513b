"""A client's connection to the server, with the calls."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TypeAlias

import grpc
from trtmesh.chassis.allocator import FreePages
from trtmesh.chassis.connection_settings import ConnectionSettings
from trtmesh.chassis.fair.limits import Budget, ConnectionCounts, origin_of
from trtmesh.chassis.fair.turns import ParseScheduler, StartQueue, StartScheduler
from trtmesh.chassis.grpc.server.call import CallConnection, CallPolicy, Handler, ServerCall
from trtmesh.chassis.grpc.server.headers import (
    NotGrpc,
    RequestHeaders,
    http_response,
    parse_request_headers,
    response_headers,
    trailers,
)
from trtmesh.chassis.grpc.server.refusals import RefusedCall
from trtmesh.chassis.http2 import rates
from trtmesh.chassis.http2.connection import initial_settings
from trtmesh.chassis.http2.frames import (
    INITIAL_WINDOW_SIZE,
    PREFACE,
    STREAM_ID_MASK,
    ErrorCode,
    FrameType,
    Http2ConnectionError,
    Http2StreamError,
    Setting,
    frame,
    goaway,
)
from trtmesh.chassis.http2.headers import (
    MAX_HEADER_LIST_SIZE,
    MAX_REMEMBERED,
    MAX_REMEMBERED_SIZE,
    Fields,
    HeaderBlock,
)
from trtmesh.chassis.http2.writer import SendStream
from trtmesh.chassis.logs import Occasionally
from trtmesh.chassis.rpc import Refusal
from trtmesh.chassis.tls.identity import CertificateNames, identity_of

log = logging.getLogger(__name__)
occasionally = Occasionally(log)

MAX_CONCURRENT_STREAMS = 1000
"""Limit of calls on a connection, including ended calls with a handler in cleanup."""

_OPENING = initial_settings(
    Setting.MAX_CONCURRENT_STREAMS, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE
)

_NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 40\r\n"
    b"Connection: close\r\n\r\n"
    b"This port speaks gRPC, which is HTTP/2.\n"
)

FAREWELL_SECONDS = 5.0
"""How long a client may take to answer the PING after which a retiring connection refuses calls."""

_FAREWELL = b"farewell"
"""The payload of this PING."""


HELD_MESSAGES = 2
"""Most unread bytes from all clients together, in messages of the largest size."""

HELD_ANSWERS = 4
"""Most unread bytes of answers to all clients together, in messages of the largest size."""

IDLE_CALLS = 2
"""Most calls waiting for clients, per admitted connection on average."""

FindHandler: TypeAlias = "Callable[[RequestHeaders], Handler | Refusal | None]"
"""Returns the handler of a call, or the refusal. Returns None for an unknown method."""


class Clients:
    """The connections of a server, and what they share."""

    def __init__(
        self, policy: CallPolicy, settings: ConnectionSettings, find_handler: FindHandler
    ) -> None:
        self.policy = policy
        self.find_handler = find_handler
        self.max_age_seconds = settings.max_age_seconds
        self.counts = ConnectionCounts(settings)
        self.turns = ParseScheduler()
        self.start_scheduler = StartScheduler()
        most = policy.max_message_bytes
        self.budget = Budget(HELD_MESSAGES * most, FreePages().give_back_soon)
        self.answers = Budget(HELD_ANSWERS * most)
        self.idle = Budget(IDLE_CALLS * settings.max_open)
        self.open: set[ServerConnection] = set()
        self.changed = asyncio.Event()
        """Set when a client has left, and when a draining connection has no more calls."""
        self.closing = False
        """Whether the server admits no more connections."""


class ServerConnection(CallConnection["ServerCall | RefusedCall"], asyncio.Protocol):
    """Opens a call for each request of a client."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(PREFACE, clients.turns, clients.budget)
        self._clients = clients
        self.policy = clients.policy
        self.identity: CertificateNames | None = None
        self._parsed_headers: dict[Fields, RequestHeaders] = {}
        """Of the latest calls: most calls of a client have the same."""
        self._draining = False
        self._opened = False
        self._retiring = False
        self._retire_at = math.inf
        self._refusal_timer: asyncio.TimerHandle | None = None
        self._admitted = False
        self._buffered = 0
        """Bytes buffered by the transport at the latest count."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.starts = StartQueue(self._clients.start_scheduler, self._origin)
        self.unread = self._clients.answers.account(self._end_least_read)
        self.idle = self._clients.idle.account(self._end_idle)
        if problem := self._clients.counts.admit(self._host):
            self._turn_away(problem)
            return
        self._admitted = True
        if age := self._clients.max_age_seconds:
            # Connections opened together must not all return together.
            self._retire_at = self._loop.time() + age * random.uniform(0.9, 1.1)  # noqa: S311 - no secret
        self.identity = identity_of(transport)
        self._clients.open.add(self)
        if self._clients.closing:
            # Accepted before the end.
            self.close()

    def _turn_away(self, problem: str) -> None:
        """Closes at once, without waiting for the client to read."""
        occasionally("full", logging.WARNING, "connection of %s refused: %s", self.peer, problem)
        self._closed = True
        self._send_goaway(ErrorCode.ENHANCE_YOUR_CALM, problem)
        self.writer.close()
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.unread.close()
        self.idle.close()
        if self._refusal_timer is not None:
            self._refusal_timer.cancel()
        if self._admitted:
            self._clients.counts.leave(self._host)
            self._clients.open.discard(self)
            self._clients.changed.set()

    @property
    def has_calls(self) -> bool:
        """Whether any call is open, or ended with a handler in cleanup."""
        return bool(self._streams)

    def drain(self) -> None:
        """Sends GOAWAY and refuses new calls; open calls continue."""
        if not self._draining:
            self._draining = True
            self._send_goaway(ErrorCode.NO_ERROR)

    def retire(self) -> None:
        """Ends the connection after the running calls, and after those that the client opens before it knows: a GOAWAY
        of all streams, and once a PING has come back, that of the last one (RFC 9113, 6.8)."""
        if self._retiring or self._draining:
            return
        self._retiring = True
        self._greet()
        farewell = goaway(STREAM_ID_MASK, ErrorCode.NO_ERROR)
        self.writer.send(farewell + frame(FrameType.PING, 0, 0, _FAREWELL))
        self._refusal_timer = self._loop.call_later(FAREWELL_SECONDS, self._refuse_calls)

    def _receive_ping_answer(self, payload: bytes) -> None:
        if self._retiring and payload == _FAREWELL:
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        """Ends a retiring connection after the calls that it has."""
        self.drain()
        if not self._streams:
            self.close()

    def end_calls(self) -> None:
        """Ends every call with UNAVAILABLE, for clients to retry on another server."""
        for call in list(self._streams.values()):
            call.end_with(grpc.StatusCode.UNAVAILABLE, "the server stops")

    def _fail(self, error: Http2ConnectionError) -> None:
        if self._closed:
            return
        occasionally(error.code.name, logging.INFO, "connection error of %s: %s", self.peer, error)
        self._disconnect_streams(str(error))
        if self._opened or self._reader.greeted:
            self._send_goaway(error.code, str(error))
        else:
            self.writer.send(_NOT_HTTP2)
        self.close()

    def _disconnect_streams(self, reason: str) -> None:
        self._turns.take(_Disconnection(self._streams, reason), self._origin)

    def _origin_of(self, host: str) -> str:
        return origin_of(host)

    def _greet(self) -> None:
        """Not before the client's preface: clients of HTTP/1.1 get an answer in HTTP/1.1."""
        if not self._opened:
            self._opened = True
            self.writer.send(_OPENING)

    def _send_goaway(self, code: ErrorCode, debug_data: str = "") -> None:
        self._greet()
        self.writer.send(goaway(self._last_stream_id, code, debug_data))

    def _receive_header_block(self, block: HeaderBlock) -> None:
        stream_id = block.stream_id
        if stream_id > self._last_stream_id:
            if stream_id % 2 == 0:
                raise Http2ConnectionError(
                    ErrorCode.PROTOCOL_ERROR, "clients open streams with odd identifiers"
                )
            self._last_stream_id = stream_id
            self.rates.note_opened()
            try:
                self._open_call(block)
            finally:
                if stream_id not in self._streams:
                    self._closed_streams.add(stream_id, ended_by_peer=block.end_stream)
        elif (call := self._streams.get(stream_id)) is not None:
            call.receive_trailers(block)
        else:
            self._closed_streams.check_headers(stream_id)
            # Trailers, on their way when the call ended.
            self.rates.count(rates.CLOSED_STREAM)

    def _open_call(self, block: HeaderBlock) -> None:
        stream_id = block.stream_id
        if self._draining or len(self._streams) >= MAX_CONCURRENT_STREAMS:
            raise Http2StreamError(ErrorCode.REFUSED_STREAM, "too many calls, or draining")
        stream = self.writer.open_stream(stream_id)
        try:
            headers = self._headers_of(block)
        except NotGrpc as error:
            self.rates.count(rates.REFUSED_CALL)
            response = http_response(error.status)
            self.writer.send_trailers(stream, response, reset=not block.end_stream)
            return
        if block.size > MAX_HEADER_LIST_SIZE:
            self._refuse(
                stream,
                block,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"metadata has {block.size} bytes but must have at most {MAX_HEADER_LIST_SIZE}",
            )
            return
        if (handler := self._clients.find_handler(headers)) is None:
            self._refuse(stream, block, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        if isinstance(handler, Refusal):
            self.rates.count(rates.REFUSED_CALL)
            refused = self._streams[stream_id] = RefusedCall(handler, stream, self)
            if block.end_stream:
                refused.receive_end_stream()
            return
        call = self._streams[stream_id] = ServerCall(headers, handler, stream, self)
        call.wait_for_client()
        if block.end_stream:
            call.receive_end_stream()

    def _headers_of(self, block: HeaderBlock) -> RequestHeaders:
        """The parsed headers of a call. Raises Http2StreamError and NotGrpc."""
        fields = block.fields
        if (known := self._parsed_headers.get(fields)) is not None:
            return known
        headers = parse_request_headers(fields)
        if block.size <= MAX_REMEMBERED_SIZE:
            if len(self._parsed_headers) == MAX_REMEMBERED:
                self._parsed_headers.clear()
            self._parsed_headers[fields] = headers
        return headers

    def _refuse(
        self, stream: SendStream, block: HeaderBlock, status: grpc.StatusCode, details: str
    ) -> None:
        """Answers a call without a handler."""
        self.rates.count(rates.REFUSED_CALL)
        response = response_headers() + trailers(status, details)
        self.writer.send_trailers(stream, response, reset=not block.end_stream)

    def count_failure(self) -> None:
        try:
            self.rates.count(rates.FAILED_CALL)
        except Http2ConnectionError as error:
            self._fail(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_buffered()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._count_buffered()

    def _count_buffered(self) -> None:
        """Counts the answers buffered by the transport, with status and metadata. The account may end the connection to
        make room."""
        buffered = self._transport.get_write_buffer_size() if self.writer.paused else 0
        change, self._buffered = buffered - self._buffered, buffered
        self.unread.add(change)

    def _end_least_read(self) -> None:
        """Ends the call with the largest unread answer, or the connection if the transport buffers more, to make room
        for other connections."""
        occasionally("unread", logging.WARNING, "%s reads too little of its answers", self.peer)
        call = max(self._streams.values(), key=lambda call: call.unread, default=None)
        if call is None or call.unread < self._buffered:
            self._transport.abort()
        else:
            call.fail(ErrorCode.ENHANCE_YOUR_CALM)

    def _end_idle(self) -> None:
        """Ends the latest call waiting for the client, to make room for other connections."""
        for call in reversed(self._streams.values()):
            if call.idle:
                occasionally("idle", logging.WARNING, "%s has too many idle calls", self.peer)
                if call.unread:
                    # A status would have to follow the answer.
                    call.fail(ErrorCode.ENHANCE_YOUR_CALM)
                    return
                call.end_with(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "too many calls wait for their clients; finish some before you open others",
                )
                return

    def _look_at_streams(self) -> None:
        if self._loop.time() >= self._retire_at and not self._retiring:
            self.retire()
        self._count_buffered()
        for call in list(self._streams.values()):
            call.end_if_overdue()

    def forget(self, stream_id: int) -> None:
        super().forget(stream_id)
        if self._draining and not self._streams:
            self._clients.changed.set()
            if self._retiring:
                self.close()

    def _receive_goaway(self, last_stream_id: int, code: ErrorCode, debug_data: str) -> None:
        """The client opens no more streams, and closes after the last call."""

    def _take_settings(self, values: Mapping[int, int]) -> None:
        """No other setting of a client concerns a server."""


class _Disconnection:
    """Ends the calls of a lost connection in turns: twenty connections may be lost at once, with a thousand each."""

    def __init__(self, streams: Mapping[int, ServerCall | RefusedCall], reason: str) -> None:
        self._streams, self._reason = streams, reason
        self._left = [*streams.items()]

    def go_on(self, until: float) -> bool:
        while self._left:
            stream_id, stream = self._left.pop()
            # The stream may have ended since.
            if self._streams.get(stream_id) is stream:
                stream.disconnect(self._reason)
            if perf_counter() >= until:
                break
        return bool(self._left)

    def completed(self) -> None:
        """Nobody waits for the end."""
