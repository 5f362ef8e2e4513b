"""An HTTP/2 connection: received frames, flow control, keepalive, close."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from trtmesh.chassis.fair.limits import Account, Budget
from trtmesh.chassis.fair.turns import ConnectionQueue, ParseScheduler
from trtmesh.chassis.http2 import rates
from trtmesh.chassis.http2.frames import (
    ACK,
    END_STREAM,
    FRAME_HEADER,
    INITIAL_HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    PADDED,
    STREAM_ID_MASK,
    Buffer,
    Data,
    ErrorCode,
    Frame,
    FrameReader,
    FrameType,
    Http2ConnectionError,
    Http2StreamError,
    Setting,
    check_length,
    check_no_stream,
    frame,
    parse_settings,
    rst_stream,
    settings,
    window_update,
    without_padding,
)
from trtmesh.chassis.http2.headers import MAX_HEADER_LIST_SIZE, HeaderBlock, HeaderDecoder
from trtmesh.chassis.http2.rates import FrameRates
from trtmesh.chassis.http2.writer import FrameWriter, SendStream

log = logging.getLogger(__name__)

MAX_FRAME_SIZE = 2**20
"""Largest frame from a peer."""

CONNECTION_WINDOW_SIZE = 2**24
"""Flow-control window of all streams of a connection together."""

MAX_SETTINGS_BYTES = 600
"""Largest SETTINGS frame."""

PING_AFTER_SECONDS, PING_TIMEOUT_SECONDS = 10.0, 5.0
"""A silence of the first leads to a PING, a further silence of the second to the end of the connection. Without
SETTINGS, the first ends the connection."""

LATE_SECONDS = 1.0
"""A keepalive timer this late does not judge the peer, whose frames may be unread."""

PAUSE_SECONDS = 120.0
"""How long a peer may leave everything unread, PING included, before TCP ends the connection."""

FRAME_SECONDS = 10.0
"""Time for a peer to complete a frame or a header block."""

MIN_COUNTED_BYTES = 2**14
"""Least size of unparsed input that counts as unread bytes."""

CLOSE_SECONDS = 0.5
"""How long a peer may take to read the last frames."""

MAX_DROPPED_BYTES = 2**20
"""Bytes read and dropped after the end of the connection."""

MAX_CLOSED_STREAMS = 256
"""Closed streams remembered for a connection."""

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
    """Receives the frames of an open stream."""

    stream: SendStream

    @property
    def ended_by_peer(self) -> bool:
        """Whether the peer has ended or reset the stream."""

    @property
    def held(self) -> int:
        """Bytes received and not read."""

    def shed(self) -> None:
        """Ends the stream to free memory."""

    def receive_data(self, data: Buffer, flow_size: int) -> None:
        """DATA without padding; `flow_size` is the size for flow control. Raises Http2StreamError."""

    def receive_end_stream(self) -> None:
        """The peer half-closed the stream."""

    def receive_rst_stream(self, code: ErrorCode) -> None:
        """The peer reset the stream."""

    def fail(self, code: ErrorCode) -> None:
        """The peer caused a stream error: sends RST_STREAM."""

    def disconnect(self, reason: str) -> None:
        """The connection is lost."""


class ClosedStreams:
    """The latest closed streams of a connection, and the legality of further frames (RFC 9113, section 5.1).

    Frames in flight when this side closed a stream are legal. Frames after the peer's END_STREAM or RST_STREAM are not.
    Frames on older, forgotten streams pass as late.
    """

    def __init__(self) -> None:
        self._ended_by_peer: dict[int, bool] = {}

    def add(self, stream_id: int, *, ended_by_peer: bool) -> None:
        """Remembers a closed stream, and whether the peer had ended or reset the stream."""
        self._ended_by_peer[stream_id] = ended_by_peer
        if len(self._ended_by_peer) > MAX_CLOSED_STREAMS:
            del self._ended_by_peer[next(iter(self._ended_by_peer))]

    def check_data(self, stream_id: int) -> None:
        """Raises Http2StreamError for DATA after the peer's end of the stream."""
        if self._ended_by_peer.get(stream_id):
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "DATA on a closed stream")

    def check_headers(self, stream_id: int) -> None:
        """Raises Http2ConnectionError for HEADERS after the peer's end of the stream, or on a skipped stream."""
        ended = self._ended_by_peer.get(stream_id)
        if ended:
            raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        if ended is None:
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream below one that was opened"
            )


H = TypeVar("H", bound=StreamHandler)


class Http2Connection(asyncio.BaseProtocol, ABC, Generic[H]):
    """Dispatches received frames to the open streams. Subclasses open streams."""

    _transport: asyncio.Transport
    _host: str
    writer: FrameWriter
    _keepalive: asyncio.TimerHandle
    _look_at: float
    account: Account
    _origin: Hashable
    """Peers of an origin share turns."""
    queue: ConnectionQueue
    """Work on received messages."""
    _short_bytes = 0
    """Largest read that needs no turn if it is a lone frame."""

    def __init__(self, expected_preface: bytes, turns: ParseScheduler, budget: Budget) -> None:
        self._loop = asyncio.get_running_loop()
        self._budget = budget
        self._turns = turns
        self._received: Buffer = b""
        """Bytes waiting for a turn."""
        self._waits_for_turn = False
        self._awaits_frame = False
        """Whether the next byte begins a frame other than CONTINUATION, after the peer's SETTINGS."""
        self._unfinished_since: float | None = None
        """When the incomplete frame or header block began."""
        self._counted = 0
        """Unparsed bytes in the account."""
        self._dropped = 0
        self._reader = FrameReader(MAX_FRAME_SIZE, expected_preface)
        self._header_decoder = HeaderDecoder()
        self._streams: dict[int, H] = {}
        self._closed_streams = ClosedStreams()
        self._last_stream_id = 0
        """The highest identifier opened by the client."""
        self._receive_window = CONNECTION_WINDOW_SIZE
        self.rates = FrameRates()
        self._sent_before_ping = 0
        self._settings_received = False
        self._heard = False
        """Whether anything was received since the last look of the keepalive timer."""
        self._ping_sent = False
        self._closed = False
        self._closing: asyncio.TimerHandle | None = None
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._host, self.peer = _host_of(transport), _peer_of(transport)
        self._origin = self._origin_of(self._host)
        self.queue = ConnectionQueue(self._turns, self._origin)
        self.account = self._budget.account(self._shed)
        self.writer = FrameWriter(self._loop, self._transport)
        self._plan_look(PING_AFTER_SECONDS)

    def _origin_of(self, host: str) -> Hashable:
        """Returns the origin of a peer at `host`. Servers tell addresses apart; other peers share an origin."""
        return ""

    def data_received(self, data: Buffer) -> None:
        self._heard = True
        if self._closed:
            self._drop(data)
            return
        if len(data) <= self._short_bytes and self._awaits_frame and not self._waits_for_turn:
            try:
                is_lone = self._receive_lone(data)
            except Http2ConnectionError as error:
                self._fail(error)
                return
            if is_lone:
                if self.queue.arrivals:
                    self.queue.hand_over()
                return
        # TLS may deliver buffered bytes after reading was paused.
        self._received = bytes(self._received) + data if self._received else data
        if not self._waits_for_turn:
            waits = self._turns.take(self, self._origin)
            if self.queue.arrivals:
                self.queue.hand_over()
            if not waits:
                return
            self._waits_for_turn = True
            if not self._transport.is_closing():
                self._transport.pause_reading()
        self._count()

    def go_on(self, until: float) -> bool:
        """Acts on received frames, during a turn of the connection."""
        data, self._received = self._received, b""
        if self._waits_for_turn:
            self._loop.call_soon(self.queue.hand_over)
        if self._closed:
            return False
        self._heard = True
        received = None
        try:
            if self._awaits_frame and self._receive_lone(data):
                return False
            self._awaits_frame = False
            for received in self._reader.feed(data):
                self._receive(received)
                if self._closed:
                    return False
                if perf_counter() >= until:
                    return True
        except Http2ConnectionError as error:
            self._fail(error)
        except Exception:
            # A defect must not keep other connections from their turns.
            log.exception("frames of %s could not be processed", self.peer)
            self._transport.abort()
        held, in_block = self._reader.held, self._header_decoder.expects_continuation
        self._awaits_frame = self._settings_received and not (
            held or in_block or self._reader.data_missing
        )
        if held or in_block or self._unfinished_since is not None:
            self._note_unfinished(held, in_block=in_block, progress=received is not None)
        return False

    def _note_unfinished(self, held: int, *, in_block: bool, progress: bool) -> None:
        """Notes since when a frame or header block is incomplete, and counts the bytes."""
        if not (held or in_block):
            self._unfinished_since = None
        elif self._unfinished_since is None or (progress and not in_block):
            self._unfinished_since = self._loop.time()
        self._count()

    def _count(self) -> None:
        """Counts the unparsed bytes. The account may end a call or the connection to make room. A closed connection
        counts none."""
        held = 0 if self._closed else len(self._received) + self._reader.held
        counted = held if held >= MIN_COUNTED_BYTES else 0
        if counted != self._counted:
            change, self._counted = counted - self._counted, counted
            self.account.add(change)

    def completed(self) -> None:
        """Reads more once the received bytes are parsed."""
        self._waits_for_turn = False
        self._count()
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _drop(self, data: Buffer) -> None:
        self._dropped += len(data)
        if self._dropped > MAX_DROPPED_BYTES:
            self._transport.abort()

    def eof_received(self) -> None:
        if not self._transport.can_write_eof():
            # TLS has no half-closed connections, and logs writes to closed connections.
            self.writer.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self.account.close()
        self.writer.abandon()
        self._disconnect_streams(CLOSED if error is None else reason_of(error))
        self._keepalive.cancel()
        if self._closing is not None:
            self._closing.cancel()

    def pause_writing(self) -> None:
        self.writer.pause()

    def resume_writing(self) -> None:
        self.writer.resume()

    def close(self) -> None:
        """Closes the connection after the frames already sent. Keeps reading for a while: closing with unread input
        would reset the connection before the peer has read them."""
        if not self._closed:
            self._closed = True
            self._count()
            self.writer.close()
            self._closing = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)
            if not self._transport.can_write_eof():
                # TLS has no half-closed connections.
                self._transport.close()
            elif not self._transport.is_closing():
                with suppress(OSError):  # The peer may disconnect at this moment.
                    self._transport.write_eof()

    @abstractmethod
    def _greet(self) -> None:
        """Sends this side's SETTINGS, once: at the latest when the peer's first frame has come."""

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
    def _take_settings(self, values: Mapping[int, int]) -> None:
        """Takes the settings of servers or of clients alone, after the others of the same frame."""

    def _shed(self) -> None:
        """Ends the largest stream, or the connection if its unparsed input is larger, to make room for others."""
        largest = max(self._streams.values(), key=lambda stream: stream.held, default=None)
        if largest is not None and largest.held >= self._counted:
            largest.shed()
        else:
            self._fail(
                Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many unread bytes are held")
            )

    def forget(self, stream_id: int) -> None:
        """A stream is closed."""
        stream = self._streams.pop(stream_id)
        self._closed_streams.add(stream_id, ended_by_peer=stream.ended_by_peer)

    def _disconnect_streams(self, reason: str) -> None:
        for stream in list(self._streams.values()):
            stream.disconnect(reason)

    def _keep_alive(self) -> None:
        if not (self._settings_received or self._is_excused):
            # Single bytes are no greeting.
            self._transport.abort()
            return
        since = self._unfinished_since
        if since is not None and not self._is_excused and self._loop.time() - since > FRAME_SECONDS:
            problem = f"a frame or header block was not complete within {FRAME_SECONDS:g} s"
            self._fail(Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, problem))
            return
        self._look_at_streams()
        if self._ping_sent and not self._heard and not self._is_excused:
            silent_seconds = PING_AFTER_SECONDS + PING_TIMEOUT_SECONDS
            self._disconnect_streams(f"the peer was silent for {silent_seconds:g} s")
            self._transport.abort()
            return
        if not self._ping_sent or self._heard:
            # Without SETTINGS, the loop was late.
            self._ping_sent = self._settings_received and not self._heard
            if self._ping_sent:
                self.writer.send(_PING)
        self._heard = False
        self._plan_look(PING_TIMEOUT_SECONDS if self._ping_sent else PING_AFTER_SECONDS)

    def _look_at_streams(self) -> None:
        """Ends streams past their time. Called every few seconds."""

    @property
    def _is_excused(self) -> bool:
        """Whether a silent peer is excused: an answer may be unread, or the PING unsent."""
        late = self._loop.time() - self._look_at > LATE_SECONDS
        return late or self._waits_for_turn or self.writer.paused

    def _plan_look(self, seconds: float) -> None:
        self._look_at = self._loop.time() + seconds
        self._keepalive = self._loop.call_at(self._look_at, self._keep_alive)

    def _receive(self, received: Frame | Data) -> None:
        """Acts on a frame. Raises Http2ConnectionError."""
        if not self._settings_received:
            self._greet()
            if received.type != FrameType.SETTINGS or received.flags & ACK:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "first frame is not SETTINGS")
        if self._header_decoder.expects_continuation and received.type != FrameType.CONTINUATION:
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR, "header block is interrupted by another frame"
            )
        receive = self._RECEIVERS.get(received.type)
        if receive is None:
            # A frame of an extension (RFC 9113, section 5.5).
            self.rates.count(rates.UNKNOWN)
            return
        try:
            receive(self, received)
        except Http2StreamError as error:
            self._fail_stream(received.stream_id, error)

    def _fail_stream(self, stream_id: int, error: Http2StreamError) -> None:
        # At the level debug: peers can cause stream errors at any rate.
        log.debug("stream error of %s: %s", self.peer, error)
        self.rates.count(rates.STREAM_ERROR)
        if (stream := self._streams.get(stream_id)) is not None:
            stream.fail(error.code)
        else:
            self.writer.send(rst_stream(stream_id, error.code))

    def _receive_lone(self, data: Buffer) -> bool:
        """Acts on a DATA frame of an open stream without flags and with nothing behind, as a message between services
        arrives; returns whether `data` is one, and the window needs no update."""
        size = len(data) - FRAME_HEADER.size
        window = self._receive_window - size
        if not 0 < size <= MAX_FRAME_SIZE or window < CONNECTION_WINDOW_SIZE // 2:
            return False
        length_and_type, flags, stream_id = FRAME_HEADER.unpack_from(data)
        # The type DATA is 0.
        if flags or length_and_type != size << 8:
            return False
        if (stream := self._streams.get(stream_id)) is None:
            return False
        self._receive_window = window
        try:
            stream.receive_data(data[FRAME_HEADER.size :], size)
        except Http2StreamError as error:
            self._fail_stream(stream_id, error)
        return True

    def _receive_data(self, received: Data) -> None:
        size = len(received.payload)
        self._receive_window -= size
        if self._receive_window < 0:
            raise Http2ConnectionError(
                ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the window of the connection"
            )
        if self._receive_window < CONNECTION_WINDOW_SIZE // 2:
            self.writer.send(window_update(0, CONNECTION_WINDOW_SIZE - self._receive_window))
            self._receive_window = CONNECTION_WINDOW_SIZE
        data = without_padding(received) if received.flags & PADDED else received.payload
        if not data and not received.flags & END_STREAM:
            self.rates.count(rates.EMPTY_DATA)
        if (stream := self._streams.get(received.stream_id)) is None:
            stream = self._stream_of(received)
        if stream is not None:
            stream.receive_data(data, size)
            if received.flags & END_STREAM:
                stream.receive_end_stream()
        else:
            self._closed_streams.check_data(received.stream_id)

    def _stream_of(self, received: Frame | Data) -> H | None:
        """Returns the stream of a frame, or None if closed."""
        if not 0 < received.stream_id <= self._last_stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "frame on an idle stream")
        if (stream := self._streams.get(received.stream_id)) is None:
            # The frame may have been in flight when the stream was closed.
            self.rates.count(rates.CLOSED_STREAM)
        return stream

    def send_window_update(self, stream_id: int, increment: int) -> None:
        self.writer.send(window_update(stream_id, increment))

    def _receive_headers(self, received: Frame) -> None:
        if (block := self._header_decoder.headers(received)) is not None:
            self._receive_header_block(block)

    def _receive_continuation(self, received: Frame) -> None:
        if (block := self._header_decoder.continuation(received)) is not None:
            self._receive_header_block(block)

    def _receive_priority(self, received: Frame) -> None:
        """Priorities are deprecated and ignored (RFC 9113, section 5.3.2)."""
        self.rates.count(rates.PRIORITY)
        check_length(received, 5)
        if not received.stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")

    def _receive_rst_stream(self, received: Frame) -> None:
        check_length(received, 4)
        self.rates.count(rates.RST_STREAM)
        if (stream := self._stream_of(received)) is not None:
            stream.receive_rst_stream(ErrorCode.parse(received.payload))

    def _receive_settings(self, received: Frame) -> None:
        check_no_stream(received)
        if received.flags & ACK:
            check_length(received, 0)
            return
        self._settings_received = True
        # Each may touch every stream.
        self.rates.count(rates.SETTINGS)
        if len(received.payload) > MAX_SETTINGS_BYTES:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM, f"SETTINGS has over {MAX_SETTINGS_BYTES} bytes"
            )
        values = dict(parse_settings(received))
        # Before DATA of the new windows: the peer counts by the old windows until the ACK.
        self.writer.send(_SETTINGS_ACK)
        for name, value in values.items():
            if name == Setting.INITIAL_WINDOW_SIZE:
                open_streams = [stream.stream for stream in self._streams.values()]
                self.writer.set_initial_window_size(value, open_streams)
            elif name == Setting.HEADER_TABLE_SIZE and value < INITIAL_HEADER_TABLE_SIZE:
                self.writer.acknowledge_header_table_size()
            elif name == Setting.MAX_FRAME_SIZE:
                self.writer.set_max_frame_size(value)
        self._take_settings(values)

    def _receive_push_promise(self, received: Frame) -> None:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE is disabled")

    def _receive_ping(self, received: Frame) -> None:
        check_no_stream(received)
        check_length(received, 8)
        sent = self.writer.data_bytes
        if sent == self._sent_before_ping:
            self.rates.count(rates.PING)
        # Clients measure the network by a PING for each round trip with DATA.
        self._sent_before_ping = sent
        if received.flags & ACK:
            self._receive_ping_answer(received.payload)
        else:
            self.writer.send(frame(FrameType.PING, ACK, 0, received.payload))

    def _receive_ping_answer(self, payload: bytes) -> None:
        """A PING has come back."""

    def _receive_goaway_frame(self, received: Frame) -> None:
        payload = received.payload
        self.rates.count(rates.GOAWAY)
        check_no_stream(received)
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
            if not self.writer.increment_window(increment):
                self.rates.count(rates.WINDOW_UPDATE)
        elif (stream := self._stream_of(received)) is not None:
            if not increment:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            if not self.writer.increment_stream_window(stream.stream, increment):
                self.rates.count(rates.WINDOW_UPDATE)

    _RECEIVERS: ClassVar[dict[int, Callable[[Http2Connection[Any], Any], None]]] = {
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
    """Sets TCP_USER_TIMEOUT on a connection or a listener, if available, which also ends connections of peers that read
    nothing. PING finds other dead peers."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(PAUSE_SECONDS * 1000)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def reason_of(error: Exception) -> str:
    """The text of a system error, without the number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _host_of(transport: asyncio.BaseTransport) -> str:
    return str((transport.get_extra_info("peername") or ("unknown",))[0])


def _peer_of(transport: asyncio.BaseTransport) -> str:
    """Returns the peer's address in gRPC's form."""
    name = transport.get_extra_info("peername") or ("unknown", 0)
    host, port = name[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
