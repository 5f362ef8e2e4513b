"""An HTTP/1.1 server on the event loop, within limits of connections, heads and time."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from trtmesh.chassis.addresses import bind
from trtmesh.chassis.logs import Occasionally
from trtmesh.chassis.quoting import cut
from trtmesh.chassis.tls.certificates import ServerTls
from trtmesh.chassis.tls.listener import TlsListener, serve

log = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""How long a client may keep sending after an early answer."""
CLOSE_SECONDS = 0.5
"""Time left to requests once the process stops, as at the gRPC server."""
MAX_LINE_BYTES = 8190
"""Longest request line, and longest header."""
MAX_HEADERS = 128
"""Most headers of a request."""
MAX_PROBLEM_CHARACTERS = 128
"""Longest report of bytes that are no request."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one server gives to its clients."""

    connections: int
    """Most open connections; further ones are answered with 503."""
    idle_seconds: float
    """How long a connection may idle, or take to send the head of a request."""
    stall_seconds: float
    """How long a client may read nothing of an answer."""


class HttpServer:
    """Serves an application from `open` to `close`. A client that disconnects cancels its request."""

    def __init__(
        self, app: web.Application, limits: HttpLimits, tls: ServerTls | None = None
    ) -> None:
        self.limits = limits
        self._tls = tls
        self.connections = 0
        self.occasionally = Occasionally(log)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS
        )
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | TlsListener | None = None

    def listen(self, host: str, port: int, purpose: str) -> tuple[str, int]:
        """Takes the address; returns it and its port. Raises StartupError."""
        self._socket, address = bind(host, port, purpose)
        return address, self._socket.getsockname()[1]

    async def open(self) -> None:
        assert self._socket is not None
        await self._runner.setup()
        self._listener = await serve(self._socket, self._connection, self._tls)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        if self._socket is not None:
            self._socket.close()

    def _connection(self) -> _Connection:
        assert self._runner.server is not None
        return _Connection(self, self._runner.server)


class _Connection(web.RequestHandler):
    """A client's connection."""

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
        self._admitted = False
        self._stalled: asyncio.TimerHandle | None = None
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._server.connections >= self._server.limits.connections:
            self._refuse(cast(asyncio.Transport, transport))
            return
        self._server.connections += 1
        self._admitted = True
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._admitted:
            self._admitted = False
            self._server.connections -= 1
        self._forget_stall()
        super().connection_lost(exc)

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Answers before a request is read, which its parser would need memory for."""
        self._server.occasionally(
            "full", logging.WARNING, "connection refused: %d are open", self._server.connections
        )
        body = _error_body(f"the server has {self._server.connections} connections, its limit")
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.force_close()
        transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stall()

    def _watch_reading(self) -> None:
        """Looks again after the time in which the client must have read something."""
        assert self.transport is not None
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._stalled = self._loop.call_later(
            self._server.limits.stall_seconds, self._end_unless_read
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
        """Answers bytes that are no request of HTTP/1.1: TLS, HTTP/2, or a head beyond the limits.

        A defect of a handler is left to aiohttp, which logs its traceback.
        """
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        problem = cut((message or "").partition("\n")[0].strip(" :"), MAX_PROBLEM_CHARACTERS)
        self._server.occasionally(
            "bytes", logging.INFO, "no request of HTTP/1.1 from %s: %s", request.remote, problem
        )
        sentence = f"the server expects a request of HTTP/1.1: {problem}"
        response = web.Response(
            status=status, body=_error_body(sentence), content_type="application/json"
        )
        response.force_close()
        return response


def _error_body(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()
