"""The calls of one connection, and the rules by which frames reach them (RFC 9113), for either side."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from trtmesh.chassis.http2.frames import (
    ACK,
    END_STREAM,
    MOST_WINDOW_BYTES,
    USUAL_TABLE_BYTES,
    ConnectionFailed,
    ErrorCode,
    Frame,
    Kind,
    Setting,
    StreamFailed,
    frame,
    go_away,
    parse_settings,
    reset,
    window_update,
    without_padding,
)
from trtmesh.chassis.http2.headers import HeaderBlock, HeaderBlocks
from trtmesh.chassis.http2.writer import Output, OutStream

log = logging.getLogger(__name__)

MOST_SETTINGS = 100
"""Changes of settings that a peer may make in a second: each concerns every call."""

WINDOW_BYTES = 2**24
"""What a peer may send on all calls of a connection together before it is told that more is taken."""


class Exchange(Protocol):
    """One call, as frames concern it."""

    stream: OutStream

    def take(self, size: int, data: bytes) -> None:
        """Takes the payload of a frame that counts `size` bytes. Raises StreamFailed."""

    def half_closed(self) -> None:
        """The peer has sent its last message."""

    def reset(self, code: ErrorCode) -> None:
        """Ends the call without a status: the peer broke a rule."""

    def was_reset(self, code: ErrorCode) -> None:
        """The peer has ended the call at once."""

    def lost(self, why: str) -> None:
        """The peer is gone."""


C = TypeVar("C", bound=Exchange)


class Streams(ABC, Generic[C]):
    """The streams of HTTP/2 that are open, a call each."""

    def __init__(self, output: Output, peer: str) -> None:
        self._output = output
        self._peer = peer
        self._blocks = HeaderBlocks()
        self._calls: dict[int, C] = {}
        self._window = WINDOW_BYTES
        self._last_stream = 0
        """The last that the client opened."""
        self._loop = asyncio.get_running_loop()
        self._settings = 0
        self._settings_since = self._loop.time()
        self.greeted = False
        """Whether the peer has sent its settings, which come first."""

    def say_farewell(self, code: ErrorCode, last_stream: int, why: str = "") -> None:
        """Tells the peer which of its calls is the last, and why."""
        self._output.put(go_away(last_stream, code, why))

    def lose(self, why: str) -> None:
        """Ends every call: nobody is there to be told."""
        for call in list(self._calls.values()):
            call.lost(why)

    def take(self, received: Frame) -> None:
        """Acts on a frame. Raises ConnectionFailed."""
        if not self.greeted and (received.kind != Kind.SETTINGS or received.flags & ACK):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "settings must come first")
        if self._blocks.open and received.kind != Kind.CONTINUATION:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        take = self._TAKE.get(received.kind)
        if take is None:
            # Of an extension.
            return
        try:
            take(self, received)
        except StreamFailed as error:
            self._fail_stream(received.stream, error)

    @abstractmethod
    def _on_block(self, block: HeaderBlock) -> None:
        """Takes headers or trailers. Raises ConnectionFailed and StreamFailed."""

    @abstractmethod
    def _on_go_away(self, last_stream: int, code: ErrorCode, why: str) -> None:
        """The peer takes no call after `last_stream`."""

    @abstractmethod
    def _on_setting(self, name: int, value: int) -> None:
        """Takes a setting that concerns one side alone."""

    def _fail_stream(self, stream: int, error: StreamFailed) -> None:
        # Not louder: a peer can break rules as fast as it sends.
        log.debug("a call of %s ends: %s", self._peer, error)
        if (call := self._calls.get(stream)) is not None:
            call.reset(error.code)
        else:
            self._output.put(reset(stream, error.code))

    def _take_data(self, received: Frame) -> None:
        size = len(received.payload)
        self._window -= size
        if self._window < 0:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "more data came than was allowed")
        if self._window < WINDOW_BYTES // 2:
            self._output.put(window_update(0, WINDOW_BYTES - self._window))
            self._window = WINDOW_BYTES
        data = without_padding(received)
        if (call := self._known(received)) is not None:
            call.take(size, data)
            if received.flags & END_STREAM:
                call.half_closed()

    def _known(self, received: Frame) -> C | None:
        """The call of a frame; None when it is over."""
        if not 0 < received.stream <= self._last_stream:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a stream was never opened")
        return self._calls.get(received.stream)

    def _grant(self, stream: int, more: int) -> None:
        self._output.put(window_update(stream, more))

    def _take_headers(self, received: Frame) -> None:
        if (block := self._blocks.begin(received)) is not None:
            self._on_block(block)

    def _take_continuation(self, received: Frame) -> None:
        if (block := self._blocks.go_on(received)) is not None:
            self._on_block(block)

    def _take_priority(self, received: Frame) -> None:
        """Calls have none."""

    def _take_reset(self, received: Frame) -> None:
        _check_size(received, 4)
        if (call := self._known(received)) is not None:
            call.was_reset(_error_code(received.payload))

    def _take_settings(self, received: Frame) -> None:
        if received.flags & ACK:
            return
        self.greeted = True
        values = dict(parse_settings(received))
        self._count_settings()
        # Before any data that new windows let go: a peer counts by its old ones until it reads this.
        self._output.put(frame(Kind.SETTINGS, ACK, 0))
        for name, value in values.items():
            if name == Setting.INITIAL_WINDOW_SIZE:
                self._output.set_first_window(value, [c.stream for c in self._calls.values()])
            elif name == Setting.HEADER_TABLE_SIZE and value < USUAL_TABLE_BYTES:
                self._output.shrink_table()
            elif name == Setting.MAX_FRAME_SIZE:
                self._output.set_frame_bytes(value)
            else:
                self._on_setting(name, value)

    def _count_settings(self) -> None:
        now = self._loop.time()
        if now - self._settings_since >= 1.0:
            self._settings_since, self._settings = now, 0
        self._settings += 1
        if self._settings > MOST_SETTINGS:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "settings change too often")

    def _take_push_promise(self, received: Frame) -> None:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "nothing may be promised here")

    def _take_ping(self, received: Frame) -> None:
        _check_size(received, 8)
        if not received.flags & ACK:
            self._output.put(frame(Kind.PING, ACK, 0, received.payload))

    def _take_go_away(self, received: Frame) -> None:
        payload = received.payload
        if received.stream:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a farewell is of one stream")
        if len(payload) < 8:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a farewell is cut off")
        last_stream = int.from_bytes(payload[:4]) & MOST_WINDOW_BYTES
        why = payload[8:200].decode("utf-8", "replace")
        self._on_go_away(last_stream, _error_code(payload[4:8]), why)

    def _take_window_update(self, received: Frame) -> None:
        _check_size(received, 4)
        more = int.from_bytes(received.payload) & MOST_WINDOW_BYTES
        if not received.stream:
            if not more:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
            self._output.widen(more)
        elif (call := self._known(received)) is not None:
            if not more:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
            self._output.widen_stream(call.stream, more)

    _TAKE: ClassVar[dict[int, Callable[[Streams[Any], Frame], None]]] = {
        Kind.DATA: _take_data,
        Kind.HEADERS: _take_headers,
        Kind.PRIORITY: _take_priority,
        Kind.RST_STREAM: _take_reset,
        Kind.SETTINGS: _take_settings,
        Kind.PUSH_PROMISE: _take_push_promise,
        Kind.PING: _take_ping,
        Kind.GOAWAY: _take_go_away,
        Kind.WINDOW_UPDATE: _take_window_update,
        Kind.CONTINUATION: _take_continuation,
    }


def _error_code(payload: bytes) -> ErrorCode:
    """The code of four bytes. One that is not known here counts as INTERNAL_ERROR (RFC 9113, section 7)."""
    try:
        return ErrorCode(int.from_bytes(payload))
    except ValueError:
        return ErrorCode.INTERNAL_ERROR


def _check_size(received: Frame, size: int) -> None:
    if len(received.payload) != size:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a frame has not the size of its type")
