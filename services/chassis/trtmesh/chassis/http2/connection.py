"""One connection, from its first byte to its last, for either side."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast

from trtmesh.chassis.http2.frames import (
    FIRST_WINDOW_BYTES,
    ConnectionFailed,
    FrameReader,
    Kind,
    Setting,
    frame,
    settings,
    window_update,
)
from trtmesh.chassis.http2.headers import HEADER_LIST_BYTES
from trtmesh.chassis.http2.keepalive import ANSWER_SECONDS, SILENCE_SECONDS, Keepalive
from trtmesh.chassis.http2.streams import WINDOW_BYTES, Streams
from trtmesh.chassis.http2.writer import Output

TAKEN_FRAME_BYTES = 2**20

FAREWELL_SECONDS = 0.5
"""How long a peer may take to read the last of what was sent."""

CLOSED = "the connection was closed"

_PING = frame(Kind.PING, 0, 0, bytes(8))

S = TypeVar("S", bound=Streams[Any])


def greeting(name: Setting, value: int, call_window_bytes: int) -> bytes:
    """The settings that both sides send, and one that is this side's own; `call_window_bytes` is what the peer may send
    ahead on each call."""
    values = {
        name: value,
        Setting.INITIAL_WINDOW_SIZE: call_window_bytes,
        Setting.MAX_FRAME_SIZE: TAKEN_FRAME_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES,
    }
    return settings(values) + window_update(0, WINDOW_BYTES - FIRST_WINDOW_BYTES)


class Connection(asyncio.Protocol, ABC, Generic[S]):
    """Bytes in, frames to the streams; and the end, whoever wants it."""

    _transport: asyncio.Transport
    _output: Output
    _keepalive: Keepalive
    _streams: S

    def __init__(self, reader: FrameReader) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._closed = False
        self._farewell: asyncio.TimerHandle | None = None
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none by their class.
        self._transport = cast(asyncio.Transport, transport)
        self._peer = _peer_of(transport)
        self._output = Output(self._loop, self._transport)
        self._streams = self._open(self._output, self._peer)
        ping = partial(self._output.put, _PING)
        self._keepalive = Keepalive(ping, partial(give_up, self._streams, self._transport))

    def data_received(self, data: bytes) -> None:
        self._keepalive.heard()
        if self._closed:
            return
        try:
            for received in self._reader.feed(data):
                self._streams.take(received)
        except ConnectionFailed as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._output.discard()
        self._streams.lose(CLOSED if error is None else why_of(error))
        self._keepalive.close()
        if self._farewell is not None:
            self._farewell.cancel()

    def pause_writing(self) -> None:
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()

    def close(self) -> None:
        """Ends the connection behind what was put. What still comes is read and dropped for a while: to close at once
        would make the system drop what the peer has not read."""
        if not self._closed:
            self._closed = True
            self._output.close()
            self._farewell = self._loop.call_later(FAREWELL_SECONDS, self._transport.abort)
            if not self._transport.is_closing():
                with suppress(OSError):  # of a peer that has gone this very moment
                    self._transport.write_eof()

    @abstractmethod
    def _open(self, output: Output, peer: str) -> S:
        """Greets, and makes what takes the frames."""

    @abstractmethod
    def _fail(self, error: ConnectionFailed) -> None:
        """The peer broke a rule that concerns every call."""


def give_up(streams: Streams[Any], transport: asyncio.Transport) -> None:
    """Ends the connection of a peer that is silent."""
    streams.lose(f"the peer answered nothing for {SILENCE_SECONDS + ANSWER_SECONDS:g} s")
    transport.abort()


def why_of(error: Exception) -> str:
    """What an error of the system says, without its number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _peer_of(transport: asyncio.BaseTransport) -> str:
    """As gRPC writes addresses."""
    name = transport.get_extra_info("peername") or ("unknown", 0)
    host, port = name[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
