"""An HTTP/1.1 server on the event loop, within limits of connections, heads, bytes and time."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from trtmesh.chassis.addresses import bind
from trtmesh.chassis.fair.limits import Budget, ConnectionCounts, origin_of
from trtmesh.chassis.fair.turns import ParseScheduler, StartQueue, StartScheduler
from trtmesh.chassis.http_input import InputTransport
from trtmesh.chassis.logs import Occasionally
from trtmesh.chassis.quoting import cut
from trtmesh.chassis.tls.certificates import ServerTls
from trtmesh.chassis.tls.listener import TlsListener, serve

log = logging.getLogger(__name__)

_Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

HEAD_SECONDS = 10.0
LINGER_SECONDS = 2.0
"""How long a client may keep sending after an early answer."""
CLOSE_SECONDS = 0.5
"""Time left to requests once the process stops, as at the gRPC server."""
MAX_LINE_BYTES = 8190
"""Longest request line, and longest header."""
MAX_HEADERS = 128
"""Most headers of a request."""
MAX_SEGMENTS = 32
"""Most parts of a path. aiohttp looks for a handler by each prefix: 20 ms for a path of slashes."""
SERVER = "trtmesh"
"""In the header of this name, in place of aiohttp's and Python's versions."""
MAX_PROBLEM_CHARACTERS = 128
"""Longest report of an invalid request."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one server gives to its clients."""

    max_open: int
    """Most open connections. A further one replaces the connection of the busiest address that waits longest for the
    head of a request; where none waits, it is answered with 503."""
    max_per_address: int
    """Most open connections of one IPv4 address or one /64 network of IPv6, likewise among its own."""
    held_bytes: int
    """Most bytes that were received and not parsed, of all connections together."""
    idle_seconds: float
    """How long a connection may idle between requests."""
    unread_seconds: float
    """How long a client may read nothing of an answer."""
    head_seconds: float = HEAD_SECONDS
    """How long the head of a request may take from its first byte."""


class HttpServer:
    """Serves an application from `open` to `close`: at the address of `listen`, else the connections of another server,
    each by a protocol of `connection`. A disconnect cancels the client's request."""

    def __init__(
        self, app: web.Application, limits: HttpLimits, tls: ServerTls | None = None
    ) -> None:
        self.limits = limits
        self._tls = tls
        self.connection_counts = ConnectionCounts(limits)
        self.turns = ParseScheduler()
        self.start_scheduler = StartScheduler()
        self.budget = Budget(limits.held_bytes)
        """For handlers to count bodies in memory."""
        self.occasionally = Occasionally(log)
        self.draining = False
        self._open: set[HttpConnection] = set()
        self._waiting: dict[str, dict[HttpConnection, None]] = {}
        """Open connections without a request, by address, those that wait longest first."""
        app.on_response_prepare.append(self._complete_head)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS
        )
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | TlsListener | None = None

    def listen(self, host: str, port: int, purpose: str) -> tuple[str, int]:
        """Binds the address. Returns the address and port. Raises StartupError."""
        self._socket, address = bind(host, port, purpose)
        return address, self._socket.getsockname()[1]

    async def open(self) -> None:
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        server.request_handler = _begun_in_turn(server.request_handler)
        if self._socket is not None:
            self._listener = await serve(self._socket, self.connection, self._tls)

    def retire_connections(self) -> None:
        """Has every client open another connection for the next request, maybe to another process: from now on each
        answer is the last of a connection."""
        self.draining = True
        for connection in [*self._open]:
            connection.retire()

    async def _complete_head(self, request: web.Request, response: web.StreamResponse) -> None:
        connection_of(request).answers = True
        response.headers[hdrs.SERVER] = SERVER
        if self.draining:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()

    def admit(self, connection: HttpConnection) -> str:
        """Counts a connection until `closed`. Returns '', or why it is refused."""
        counts, origin = self.connection_counts, connection.origin
        problem = counts.admit(origin)
        if problem and self._make_room(origin if counts.is_full_for(origin) else None):
            problem = counts.admit(origin)
        if not problem:
            self._open.add(connection)
            self.waits(connection)
        return problem

    def _make_room(self, origin: str | None) -> bool:
        """Ends the connection that waits longest, of an address or else of the address with most. Returns whether one
        did: heads that never end must keep nobody out."""
        if origin is None:
            origin = max(self._waiting, key=lambda each: len(self._waiting[each]), default="")
        oldest = next(iter(self._waiting.get(origin, ())), None)
        if oldest is None:
            return False
        self.occasionally(
            "replaced", logging.INFO, "connections without a request of %s are replaced", origin
        )
        oldest.give_way()
        return True

    def waits(self, connection: HttpConnection) -> None:
        """An admitted connection has no request."""
        self._waiting.setdefault(connection.origin, {})[connection] = None

    def asks(self, connection: HttpConnection) -> None:
        """An admitted connection has a request, or is over."""
        of_address = self._waiting.get(connection.origin, {})
        of_address.pop(connection, None)
        if not of_address:
            self._waiting.pop(connection.origin, None)

    def closed(self, connection: HttpConnection) -> None:
        """A connection is over, if it was admitted."""
        if connection in self._open:
            self._open.discard(connection)
            self.connection_counts.leave(connection.origin)
            self.asks(connection)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        if self._socket is not None:
            self._socket.close()

    async def turn(self, request: web.BaseRequest) -> None:
        """Waits for another turn of the running handler, which has waited for the client since the first turn."""
        await connection_of(request).turn()

    def connection(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        return HttpConnection(self, self._runner.server)


def _begun_in_turn(handle: _Handle) -> _Handle:
    """Has each request begin in a turn of the connection: the search for a handler takes time, too."""

    async def begin(request: web.BaseRequest) -> web.StreamResponse:
        await connection_of(request).begin(request)
        if refusal := _misframed(request):
            return refusal
        if request.rel_url.raw_path.count("/") > MAX_SEGMENTS:
            return _error(HTTPStatus.NOT_FOUND, HTTPStatus.NOT_FOUND.phrase)
        return await handle(request)

    return begin


def _misframed(request: web.BaseRequest) -> web.StreamResponse | None:
    """Returns a refusal that ends the connection, if the end of a request is ambiguous or the client may not understand
    answers. Returns None for HTTP/1.1 and HTTP/1.0."""
    major, minor = request.version
    if (major, minor) not in (HttpVersion11, HttpVersion10):
        status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        problem = f"the server expects a request of HTTP/1.1, not of HTTP/{major}.{minor}"
    elif (major, minor) == HttpVersion10 and hdrs.TRANSFER_ENCODING in request.headers:
        status = HTTPStatus.BAD_REQUEST
        problem = "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1"
    else:
        return None
    # aiohttp answers in the request's version.
    request._cache["version"] = HttpVersion11
    response = _error(status, problem)
    response.force_close()
    return response


def connection_of(request: web.BaseRequest) -> HttpConnection:
    connection = request.protocol
    assert isinstance(connection, HttpConnection)
    return connection


class HttpConnection(web.RequestHandler):
    def __init__(self, server: HttpServer, manager: web.Server) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is its documented way to log nothing
            keepalive_timeout=server.limits.idle_seconds,
            lingering_time=LINGER_SECONDS,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
        )
        self._server = server
        self._host = ""
        self.origin = ""
        """The owner of the limits."""
        self._starts: StartQueue
        self._below: asyncio.Transport | None = None
        self._input: InputTransport | None = None
        """None unless the connection is admitted and open."""
        self.free_transport: asyncio.Transport | None = None
        """What writes, while it takes bytes at once."""
        self._body: StreamReader | None = None
        """Of the latest begun request."""
        self._length = 0
        """Of this body; 0 for chunks."""
        self.request_waits = False
        """Whether a parsed request waits to begin."""
        self.answers = False
        """Whether the answer to the present request has begun."""
        self._was_used = False
        """Whether any request has begun."""
        self._head_ends: asyncio.TimerHandle | None = None
        """Of a head that has begun."""
        self._stalled: asyncio.TimerHandle | None = None
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server, below = self._server, cast(asyncio.Transport, transport)
        self._host = str((below.get_extra_info("peername") or ("unknown",))[0])
        self.origin = origin_of(self._host)
        if problem := server.admit(self):
            self._refuse(below, problem)
            return
        self._starts = StartQueue(server.start_scheduler, self.origin)
        self._below = self.free_transport = below
        self._input = InputTransport(below, self, server.turns, server.budget, self.origin)
        super().connection_made(cast(asyncio.Transport, self._input))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.closed(self)
        if self._input is not None:
            self._input.drop()
            self._input = self._body = self._below = self.free_transport = None
        self._forget_stall()
        self._end_head()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Ends the connection, which has no request, for another one. An answer that is still unread is lost: its
        memory counts no longer."""
        transport = self.transport
        self._server.closed(self)
        self.force_close()
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if data and self._input is not None:
            self._input.receive(data)
        else:
            # aiohttp continues with input kept by the parser.
            super().data_received(data)

    def parse(self, piece: bytes) -> None:
        begins_head = self._head_ends is None and self._waiter is not None and self.in_head
        super().data_received(piece)
        self.request_waits = bool(self._messages)
        if self.request_waits:
            self._server.asks(self)
            self._end_head()
        elif begins_head:
            seconds = self._server.limits.head_seconds
            self._head_ends = self._loop.call_later(seconds, self.give_way)
        if self.request_waits and self._body is not None and not self._body.is_eof():
            # What waits is no request, but an error in the body, which aiohttp would tell after the answer: never.
            self._refuse_body()

    @property
    def in_head(self) -> bool:
        """Whether the next bytes belong to no body."""
        return not self.request_waits and (self._body is None or self._body.is_eof())

    @property
    def body_received(self) -> int:
        """Bytes of the body so far."""
        return self._body.total_bytes if self._body is not None else 0

    @property
    def body_left(self) -> int:
        """Bytes of a body to come, only copied; 0 for chunks."""
        return self._length - self._body.total_bytes if self._body is not None else 0

    def retire(self) -> None:
        """Ends the connection now if idle between two requests, else with the present or first answer."""
        if self._waiter is not None and self._was_used and not self._messages:
            self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Ends the connection after an answer begun before the drain. Else it waits for the next request."""
        if self._server.draining:
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if self._input is not None and not self._messages:
            self._server.waits(self)
        return finished

    async def turn(self) -> None:
        """Waits for a turn of the request."""
        await self._starts.turn_before_rest()

    async def begin(self, request: web.BaseRequest) -> None:
        """Waits for the turn of a request, then takes the body."""
        await self.turn()
        self._was_used = True
        self._body, self._length = request.content, request.content_length or 0
        self.answers = False
        self.request_waits = bool(self._messages)
        if self._input is not None:
            self._input.go_on_soon()

    def _refuse(self, transport: asyncio.Transport, problem: str) -> None:
        """Answers before reading the request, since parsing would take memory."""
        self._server.occasionally(
            "full", logging.WARNING, "connection of %s refused: %s", self._host, problem
        )
        self._end_with(transport, b"503 Service Unavailable\r\nRetry-After: 1", problem)

    def _refuse_body(self) -> None:
        """Ends the connection and the handler, since nobody knows where the body ends."""
        problem = "the body is malformed: its chunks or trailers are no HTTP/1.1"
        self._server.occasionally("body", logging.INFO, "request of %s: %s", self._host, problem)
        transport = self.transport
        if transport is None:
            return
        if self.answers:
            transport.abort()
        else:
            self._end_with(transport, b"400 Bad Request", problem)

    def _end_with(self, transport: asyncio.Transport, status: bytes, problem: str) -> None:
        """Answers without aiohttp, and closes."""
        body = _error_body(problem)
        transport.write(
            b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (status, len(body), body)
        )
        self.force_close()
        transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.free_transport = None
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.free_transport = self._below
        self._forget_stall()

    def _watch_reading(self) -> None:
        """Looks again after the time for a client to read something."""
        assert self.transport is not None
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._stalled = self._loop.call_later(
            self._server.limits.unread_seconds, self._end_unless_read
        )

    def _end_unless_read(self) -> None:
        self._stalled = None
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._watch_reading()
            return
        self._server.occasionally(
            "unread", logging.INFO, "connection ended: its client reads no answer"
        )
        self.transport.abort()

    def _end_head(self) -> None:
        """The head that had begun is whole, or never will be."""
        if self._head_ends is not None:
            self._head_ends.cancel()
            self._head_ends = None

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers an invalid request: TLS, HTTP/2, or a head beyond the limits. aiohttp answers a defect of a handler,
        and logs the traceback.
        """
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        problem = cut((message or "").partition("\n")[0].strip(" :"), MAX_PROBLEM_CHARACTERS)
        self._server.occasionally(
            "bytes", logging.INFO, "no request of HTTP/1.1 from %s: %s", request.remote, problem
        )
        sentence = f"the server expects a request of HTTP/1.1: {problem}"
        response = _error(status, sentence)
        response.force_close()
        return response


def _error(status: int, sentence: str) -> web.Response:
    return web.Response(
        status=status,
        body=_error_body(sentence),
        content_type="application/json",
        headers={hdrs.SERVER: SERVER},
    )


def _error_body(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()
