"""The calls of one connection, and the rules by which frames reach them (RFC 9113)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol

import grpc
from trtmesh.chassis.grpc_server.call import Call, Handler
from trtmesh.chassis.grpc_server.frames import (
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
from trtmesh.chassis.grpc_server.header_blocks import (
    HEADER_LIST_BYTES,
    HeaderBlock,
    HeaderBlocks,
)
from trtmesh.chassis.grpc_server.headers import CallHead, NoCall, http_answer, parse_head
from trtmesh.chassis.grpc_server.output import Output

log = logging.getLogger(__name__)

MOST_CALLS = 16_384
"""Calls of one connection that run at once, those included whose clients have gone and whose handlers have not."""

MOST_SETTINGS = 100
"""Changes of settings that a client may make in a second: each concerns every call."""

WINDOW_BYTES = 2**24
"""What a client may send on all calls of a connection together before it is told that more is taken."""


class Owner(Protocol):
    """What calls need of their server."""

    most_message_bytes: int

    def find_handler(self, head: CallHead) -> Handler | None:
        """Who serves a call; None where nobody does."""


class Streams:
    """The streams of HTTP/2 that a client opened, a call each."""

    def __init__(self, owner: Owner, output: Output, peer: str) -> None:
        self._owner = owner
        self._output = output
        self._peer = peer
        self._blocks = HeaderBlocks()
        self._calls: dict[int, Call] = {}
        self._window = WINDOW_BYTES
        self._last_stream = 0
        self._loop = asyncio.get_running_loop()
        self._settings = 0
        self._settings_since = self._loop.time()
        self._leaving = False
        self.greeted = False
        """Whether the client has sent its settings, which come first."""

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Of the calls that run."""
        return [call.task for call in self._calls.values()]

    def leave(self) -> None:
        """Takes no new call; those that run go on."""
        if not self._leaving:
            self._leaving = True
            self.say_farewell(ErrorCode.NO_ERROR)

    def say_farewell(self, code: ErrorCode, why: str = "") -> None:
        """Tells the client which calls are the last, and why."""
        self._output.put(go_away(self._last_stream, code, why))

    def cut_off(self) -> None:
        """Ends every call, with a status that lets clients ask another server."""
        for call in list(self._calls.values()):
            call.end_with(grpc.StatusCode.UNAVAILABLE, "the server stops")

    def lose(self) -> None:
        """Ends every call: nobody is there to be told."""
        for call in list(self._calls.values()):
            call.lost()

    def take(self, received: Frame) -> None:
        """Acts on a frame. Raises ConnectionFailed."""
        if not self.greeted:
            if received.kind != Kind.SETTINGS or received.flags & ACK:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "settings must come first")
            self.greeted = True
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

    def _fail_stream(self, stream: int, error: StreamFailed) -> None:
        # Not louder: a client can break rules as fast as it sends.
        log.debug("a call of %s ends: %s", self._peer, error)
        if (call := self._calls.get(stream)) is not None:
            call.reset(error.code)
        else:
            self._output.put(reset(stream, error.code))

    def _on_data(self, received: Frame) -> None:
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
                call.half_close()

    def _known(self, received: Frame) -> Call | None:
        """The call of a frame; None when it is over."""
        if not 0 < received.stream <= self._last_stream:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a stream was never opened")
        return self._calls.get(received.stream)

    def _on_headers(self, received: Frame) -> None:
        self._on_block(self._blocks.begin(received))

    def _on_continuation(self, received: Frame) -> None:
        self._on_block(self._blocks.go_on(received))

    def _on_block(self, block: HeaderBlock | None) -> None:
        if block is None:
            return
        stream = block.stream
        if stream > self._last_stream:
            if stream % 2 == 0:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "clients open odd streams")
            self._last_stream = stream
            self._open(block)
        elif (call := self._calls.get(stream)) is not None:
            if not block.ends_stream:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "headers came behind data")
            call.half_close()
        elif stream % 2 == 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "clients open odd streams")

    def _open(self, block: HeaderBlock) -> None:
        stream = block.stream
        if self._leaving or len(self._calls) >= MOST_CALLS:
            raise StreamFailed(ErrorCode.REFUSED_STREAM, "there are too many calls")
        try:
            head = parse_head(block.fields)
        except NoCall as error:
            answer = http_answer(error.status)
            self._output.finish(self._output.open(stream), answer, half_closed=block.ends_stream)
            return
        call = Call(
            head,
            self._owner.find_handler(head),
            self._output.open(stream),
            self._output,
            partial(self._grant, stream),
            self._peer,
            self._owner.most_message_bytes,
        )
        self._calls[stream] = call
        call.task.add_done_callback(partial(self._forget, stream))
        if block.ends_stream:
            call.half_close()
        if block.size > HEADER_LIST_BYTES:
            call.end_with(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"metadata has {block.size} bytes, and at most {HEADER_LIST_BYTES} are taken",
            )

    def _grant(self, stream: int, more: int) -> None:
        self._output.put(window_update(stream, more))

    def _forget(self, stream: int, task: asyncio.Task[None]) -> None:
        del self._calls[stream]

    def _on_priority(self, received: Frame) -> None:
        """Calls have none."""

    def _on_reset(self, received: Frame) -> None:
        _check_size(received, 4)
        if (call := self._known(received)) is not None:
            call.lost()

    def _on_settings(self, received: Frame) -> None:
        if received.flags & ACK:
            return
        values = dict(parse_settings(received))
        self._count_settings()
        # Before any data that new windows let go: a client counts by its old ones until it reads this.
        self._output.put(frame(Kind.SETTINGS, ACK, 0))
        for name, value in values.items():
            if name == Setting.INITIAL_WINDOW_SIZE:
                self._output.set_first_window(value, [c.stream for c in self._calls.values()])
            elif name == Setting.HEADER_TABLE_SIZE and value < USUAL_TABLE_BYTES:
                self._output.shrink_table()
            elif name == Setting.MAX_FRAME_SIZE:
                self._output.set_frame_bytes(value)

    def _count_settings(self) -> None:
        now = self._loop.time()
        if now - self._settings_since >= 1.0:
            self._settings_since, self._settings = now, 0
        self._settings += 1
        if self._settings > MOST_SETTINGS:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "settings change too often")

    def _on_push_promise(self, received: Frame) -> None:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "clients promise nothing")

    def _on_ping(self, received: Frame) -> None:
        _check_size(received, 8)
        if not received.flags & ACK:
            self._output.put(frame(Kind.PING, ACK, 0, received.payload))

    def _on_go_away(self, received: Frame) -> None:
        """The client opens nothing more, and closes when it has what it wants."""

    def _on_window_update(self, received: Frame) -> None:
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

    _TAKE: ClassVar[dict[int, Callable[[Streams, Frame], None]]] = {
        Kind.DATA: _on_data,
        Kind.HEADERS: _on_headers,
        Kind.PRIORITY: _on_priority,
        Kind.RST_STREAM: _on_reset,
        Kind.SETTINGS: _on_settings,
        Kind.PUSH_PROMISE: _on_push_promise,
        Kind.PING: _on_ping,
        Kind.GOAWAY: _on_go_away,
        Kind.WINDOW_UPDATE: _on_window_update,
        Kind.CONTINUATION: _on_continuation,
    }


def _check_size(received: Frame, size: int) -> None:
    if len(received.payload) != size:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a frame has not the size of its type")
