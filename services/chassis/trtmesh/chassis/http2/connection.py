"""An HTTP/2 connection: received frames, flow control, keepalive, close."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from trtmesh.chassis.http2.frames import (
    ACK,
    END_STREAM,
    INITIAL_HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    STREAM_ID_MASK,
    ErrorCode,
    Frame,
    FrameReader,
    FrameType,
    Http2ConnectionError,
    Http2StreamError,
    Setting,
    check_length,
    frame,
    parse_settings,
    rst_stream,
    settings,
    window_update,
    without_padding,
)
from trtmesh.chassis.http2.headers import MAX_HEADER_LIST_SIZE, HeaderBlock, HeaderDecoder
from trtmesh.chassis.http2.writer import FrameWriter, SendStream

log = logging.getLogger(__name__)

MAX_FRAME_SIZE = 2**20
"""Largest frame that a peer may send."""

CONNECTION_WINDOW_SIZE = 2**24
"""Flow-control window of all streams of a connection together."""

MAX_SETTINGS_PER_SECOND = 100
"""SETTINGS frames of a peer: each frame touches every stream."""

PING_AFTER_SECONDS, PING_TIMEOUT_SECONDS = 10.0, 5.0
"""A peer silent for the first is sent a PING; if it stays silent for the second, the connection is aborted."""

CLOSE_SECONDS = 0.5
"""How long a peer may take to read the last frames."""

CLOSED = "the connection was closed"

_PING = frame(FrameType.PING, 0, 0, bytes(8))
_SETTINGS_ACK = frame(FrameType.SETTINGS, ACK, 0)


def initial_settings(name: Setting, value: int, initial_window_size: int) -> bytes:
    """SETTINGS with an additional setting, and the WINDOW_UPDATE of the connection."""
    values = {
        name: value,
        Setting.INITIAL_WINDOW_SIZE: initial_window_size,
        Setting.MAX_FRAME_SIZE: MAX_FRAME_SIZE,
        Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_SIZE,
    }
    return settings(values) + window_update(0, CONNECTION_WINDOW_SIZE - INITIAL_WINDOW_SIZE)


class StreamHandler(Protocol):
    """Receives the frames of one open stream."""

    stream: SendStream

    def receive_data(self, data: bytes, flow_size: int) -> None:
        """DATA without padding; `flow_size` is the size for flow control. Raises Http2StreamError."""

    def receive_end_stream(self) -> None:
        """The peer half-closed the stream."""

    def receive_rst_stream(self, code: ErrorCode) -> None:
        """The peer reset the stream."""

    def fail(self, code: ErrorCode) -> None:
        """The peer caused a stream error: sends RST_STREAM."""

    def disconnect(self, reason: str) -> None:
        """The connection is lost."""


H = TypeVar("H", bound=StreamHandler)


class Http2Connection(asyncio.Protocol, ABC, Generic[H]):
    """Dispatches received frames to the open streams. Subclasses open streams."""

    _transport: asyncio.Transport
    _writer: FrameWriter
    _keepalive: asyncio.TimerHandle

    def __init__(self, expected_preface: bytes, opening: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(MAX_FRAME_SIZE, expected_preface)
        self._opening = opening
        self._header_decoder = HeaderDecoder()
        self._streams: dict[int, H] = {}
        self._last_stream_id = 0
        """The highest identifier opened by the client."""
        self._receive_window = CONNECTION_WINDOW_SIZE
        self._settings_count = 0
        self._settings_since = self._loop.time()
        self._settings_received = False
        self._heard = False
        """Whether anything was received since the last look of the keepalive timer."""
        self._ping_sent = False
        self._closed = False
        self._closing: asyncio.TimerHandle | None = None
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._peer = _peer_of(transport)
        self._writer = FrameWriter(self._loop, self._transport)
        self._writer.send(self._opening)
        self._keepalive = self._loop.call_later(PING_AFTER_SECONDS, self._keep_alive)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._closed:
            return
        try:
            for received in self._reader.feed(data):
                self._receive(received)
        except Http2ConnectionError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._writer.abandon()
        self._disconnect_streams(CLOSED if error is None else reason_of(error))
        self._keepalive.cancel()
        if self._closing is not None:
            self._closing.cancel()

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()

    def close(self) -> None:
        """Closes the connection after the frames already sent. Keeps reading for a while: closing with unread input
        would reset the connection before the peer has read them."""
        if not self._closed:
            self._closed = True
            self._writer.close()
            self._closing = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)
            if not self._transport.is_closing():
                with suppress(OSError):  # The peer may disconnect at this moment.
                    self._transport.write_eof()

    @abstractmethod
    def _fail(self, error: Http2ConnectionError) -> None:
        """Ends the connection after a connection error."""

    @abstractmethod
    def _receive_header_block(self, block: HeaderBlock) -> None:
        """Opens a stream, or takes headers or trailers. Raises Http2Error."""

    @abstractmethod
    def _receive_goaway(self, last_stream_id: int, code: ErrorCode, debug_data: str) -> None:
        """The peer processes no stream after `last_stream_id`."""

    @abstractmethod
    def _receive_setting(self, name: int, value: int) -> None:
        """Takes a setting of servers or of clients alone."""

    def _disconnect_streams(self, reason: str) -> None:
        for stream in list(self._streams.values()):
            stream.disconnect(reason)

    def _keep_alive(self) -> None:
        if self._ping_sent and not self._heard:
            silent_seconds = PING_AFTER_SECONDS + PING_TIMEOUT_SECONDS
            self._disconnect_streams(f"the peer was silent for {silent_seconds:g} s")
            self._transport.abort()
            return
        self._ping_sent, self._heard = not self._heard, False
        if self._ping_sent:
            self._writer.send(_PING)
        seconds = PING_TIMEOUT_SECONDS if self._ping_sent else PING_AFTER_SECONDS
        self._keepalive = self._loop.call_later(seconds, self._keep_alive)

    def _receive(self, received: Frame) -> None:
        """Acts on a frame. Raises Http2ConnectionError."""
        if not self._settings_received and (
            received.type != FrameType.SETTINGS or received.flags & ACK
        ):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "first frame is not SETTINGS")
        if self._header_decoder.expects_continuation and received.type != FrameType.CONTINUATION:
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR, "header block is interrupted by another frame"
            )
        receive = self._RECEIVERS.get(received.type)
        if receive is None:
            # A frame of an extension (RFC 9113, section 5.5).
            return
        try:
            receive(self, received)
        except Http2StreamError as error:
            self._fail_stream(received.stream_id, error)

    def _fail_stream(self, stream_id: int, error: Http2StreamError) -> None:
        # At the level debug: a peer can cause stream errors as fast as it sends.
        log.debug("stream error of %s: %s", self._peer, error)
        if (stream := self._streams.get(stream_id)) is not None:
            stream.fail(error.code)
        else:
            self._writer.send(rst_stream(stream_id, error.code))

    def _receive_data(self, received: Frame) -> None:
        size = len(received.payload)
        self._receive_window -= size
        if self._receive_window < 0:
            raise Http2ConnectionError(
                ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the window of the connection"
            )
        if self._receive_window < CONNECTION_WINDOW_SIZE // 2:
            self._writer.send(window_update(0, CONNECTION_WINDOW_SIZE - self._receive_window))
            self._receive_window = CONNECTION_WINDOW_SIZE
        data = without_padding(received)
        if (stream := self._stream_of(received)) is not None:
            stream.receive_data(data, size)
            if received.flags & END_STREAM:
                stream.receive_end_stream()

    def _stream_of(self, received: Frame) -> H | None:
        """The stream of a frame; None if it is closed."""
        if not 0 < received.stream_id <= self._last_stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "frame on an idle stream")
        return self._streams.get(received.stream_id)

    def _send_window_update(self, stream_id: int, increment: int) -> None:
        self._writer.send(window_update(stream_id, increment))

    def _receive_headers(self, received: Frame) -> None:
        if (block := self._header_decoder.headers(received)) is not None:
            self._receive_header_block(block)

    def _receive_continuation(self, received: Frame) -> None:
        if (block := self._header_decoder.continuation(received)) is not None:
            self._receive_header_block(block)

    def _receive_priority(self, received: Frame) -> None:
        """Priorities are deprecated and ignored (RFC 9113, section 5.3.2)."""

    def _receive_rst_stream(self, received: Frame) -> None:
        check_length(received, 4)
        if (stream := self._stream_of(received)) is not None:
            stream.receive_rst_stream(ErrorCode.parse(received.payload))

    def _receive_settings(self, received: Frame) -> None:
        if received.flags & ACK:
            return
        self._settings_received = True
        values = dict(parse_settings(received))
        self._limit_settings()
        # Before DATA of the new windows: the peer counts by the old windows until the ACK.
        self._writer.send(_SETTINGS_ACK)
        for name, value in values.items():
            if name == Setting.INITIAL_WINDOW_SIZE:
                open_streams = [stream.stream for stream in self._streams.values()]
                self._writer.set_initial_window_size(value, open_streams)
            elif name == Setting.HEADER_TABLE_SIZE and value < INITIAL_HEADER_TABLE_SIZE:
                self._writer.acknowledge_header_table_size()
            elif name == Setting.MAX_FRAME_SIZE:
                self._writer.set_max_frame_size(value)
            else:
                self._receive_setting(name, value)

    def _limit_settings(self) -> None:
        now = self._loop.time()
        if now - self._settings_since >= 1.0:
            self._settings_since, self._settings_count = now, 0
        self._settings_count += 1
        if self._settings_count > MAX_SETTINGS_PER_SECOND:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM, f"over {MAX_SETTINGS_PER_SECOND} SETTINGS a second"
            )

    def _receive_push_promise(self, received: Frame) -> None:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE is disabled")

    def _receive_ping(self, received: Frame) -> None:
        check_length(received, 8)
        if not received.flags & ACK:
            self._writer.send(frame(FrameType.PING, ACK, 0, received.payload))

    def _receive_goaway_frame(self, received: Frame) -> None:
        payload = received.payload
        if received.stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise Http2ConnectionError(
                ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY has {len(payload)} bytes, not 8 or more"
            )
        last_stream_id = int.from_bytes(payload[:4]) & STREAM_ID_MASK
        debug_data = payload[8:200].decode("utf-8", "replace")
        self._receive_goaway(last_stream_id, ErrorCode.parse(payload[4:8]), debug_data)

    def _receive_window_update(self, received: Frame) -> None:
        check_length(received, 4)
        increment = int.from_bytes(received.payload) & STREAM_ID_MASK
        if not received.stream_id:
            if not increment:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self._writer.increment_window(increment)
        elif (stream := self._stream_of(received)) is not None:
            if not increment:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self._writer.increment_stream_window(stream.stream, increment)

    _RECEIVERS: ClassVar[dict[int, Callable[[Http2Connection[Any], Frame], None]]] = {
        FrameType.DATA: _receive_data,
        FrameType.HEADERS: _receive_headers,
        FrameType.PRIORITY: _receive_priority,
        FrameType.RST_STREAM: _receive_rst_stream,
        FrameType.SETTINGS: _receive_settings,
        FrameType.PUSH_PROMISE: _receive_push_promise,
        FrameType.PING: _receive_ping,
        FrameType.GOAWAY: _receive_goaway_frame,
        FrameType.WINDOW_UPDATE: _receive_window_update,
        FrameType.CONTINUATION: _receive_continuation,
    }


def set_user_timeout(endpoint: socket.socket) -> None:
    """Sets TCP_USER_TIMEOUT on a connection or a listener, if available: without a network, the connection has nothing
    in flight after `PING_TIMEOUT_SECONDS` and can be closed."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(PING_TIMEOUT_SECONDS * 1000)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def reason_of(error: Exception) -> str:
    """The text of a system error, without the number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _peer_of(transport: asyncio.BaseTransport) -> str:
    """The peer's address as gRPC writes it."""
    name = transport.get_extra_info("peername") or ("unknown", 0)
    host, port = name[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
