"""A client's connection to the server, and the calls on it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Protocol

import grpc
from trtmesh.chassis.grpc.server.call import Handler, ServerCall
from trtmesh.chassis.grpc.server.headers import (
    NotGrpc,
    RequestHeaders,
    http_response,
    parse_request_headers,
)
from trtmesh.chassis.http2.connection import Http2Connection, initial_settings
from trtmesh.chassis.http2.frames import (
    INITIAL_WINDOW_SIZE,
    PREFACE,
    ErrorCode,
    Http2ConnectionError,
    Http2StreamError,
    Setting,
    goaway,
)
from trtmesh.chassis.http2.headers import MAX_HEADER_LIST_SIZE, HeaderBlock

log = logging.getLogger(__name__)

MAX_CONCURRENT_STREAMS = 16_384
"""Limit of calls on one connection, including ended calls with a handler in cleanup."""

_OPENING = initial_settings(
    Setting.MAX_CONCURRENT_STREAMS, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE
)

_NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"This port speaks gRPC, which is HTTP/2.\n"
)


class Owner(Protocol):
    """The server, as its connections see it."""

    max_message_bytes: int

    def find_handler(self, headers: RequestHeaders) -> Handler | None:
        """The handler of a call; None for an unknown method."""

    def connection_opened(self, connection: ServerConnection) -> None:
        """A client has connected."""

    def connection_closed(self, connection: ServerConnection) -> None:
        """A client has disconnected."""


class ServerConnection(Http2Connection[ServerCall]):
    """Opens a call for each request of a client."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(PREFACE, _OPENING)
        self._owner = owner
        self._draining = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._owner.connection_opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._owner.connection_closed(self)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the open calls."""
        return [call.task for call in self._streams.values()]

    def drain(self) -> None:
        """Sends GOAWAY and refuses new calls; open calls continue."""
        if not self._draining:
            self._draining = True
            self._send_goaway(ErrorCode.NO_ERROR)

    def end_calls(self) -> None:
        """Ends every call with UNAVAILABLE, so that clients retry on another server."""
        for call in list(self._streams.values()):
            call.end_with(grpc.StatusCode.UNAVAILABLE, "the server stops")

    def _fail(self, error: Http2ConnectionError) -> None:
        log.info("connection error of %s: %s", self._peer, error)
        self._disconnect_streams(str(error))
        if self._settings_received:
            self._send_goaway(error.code, str(error))
        else:
            self._writer.send(_NOT_HTTP2)
        self.close()

    def _send_goaway(self, code: ErrorCode, debug_data: str = "") -> None:
        self._writer.send(goaway(self._last_stream_id, code, debug_data))

    def _receive_header_block(self, block: HeaderBlock) -> None:
        stream_id = block.stream_id
        if stream_id > self._last_stream_id:
            if stream_id % 2 == 0:
                raise _even_stream()
            self._last_stream_id = stream_id
            self._open_call(block)
        elif (call := self._streams.get(stream_id)) is not None:
            if not block.end_stream:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
            call.receive_end_stream()
        elif stream_id % 2 == 0:
            raise _even_stream()

    def _open_call(self, block: HeaderBlock) -> None:
        stream_id = block.stream_id
        if self._draining or len(self._streams) >= MAX_CONCURRENT_STREAMS:
            raise Http2StreamError(ErrorCode.REFUSED_STREAM, "too many calls, or draining")
        stream = self._writer.open_stream(stream_id)
        try:
            headers = parse_request_headers(block.fields)
        except NotGrpc as error:
            response = http_response(error.status)
            self._writer.send_trailers(stream, response, reset=not block.end_stream)
            return
        call = self._streams[stream_id] = ServerCall(
            headers,
            self._owner.find_handler(headers),
            stream,
            self._writer,
            partial(self._send_window_update, stream_id),
            self._peer,
            self._owner.max_message_bytes,
        )
        call.task.add_done_callback(partial(self._forget, stream_id))
        if block.end_stream:
            call.receive_end_stream()
        if block.size > MAX_HEADER_LIST_SIZE:
            call.end_with(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"metadata has {block.size} bytes but must have at most {MAX_HEADER_LIST_SIZE}",
            )

    def _forget(self, stream_id: int, task: asyncio.Task[None]) -> None:
        del self._streams[stream_id]

    def _receive_goaway(self, last_stream_id: int, code: ErrorCode, debug_data: str) -> None:
        """The client opens no more streams, and closes after the last call."""

    def _receive_setting(self, name: int, value: int) -> None:
        """No other setting of a client concerns a server."""


def _even_stream() -> Http2ConnectionError:
    return Http2ConnectionError(
        ErrorCode.PROTOCOL_ERROR, "clients open streams with odd identifiers"
    )
