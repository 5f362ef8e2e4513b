"""One client's connection, from its first byte to its last."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Protocol, cast

from trtmesh.chassis.grpc_server import streams
from trtmesh.chassis.grpc_server.frames import (
    FIRST_WINDOW_BYTES,
    ConnectionFailed,
    FrameReader,
    Kind,
    Setting,
    frame,
    settings,
    window_update,
)
from trtmesh.chassis.grpc_server.header_blocks import HEADER_LIST_BYTES
from trtmesh.chassis.grpc_server.keepalive import Keepalive
from trtmesh.chassis.grpc_server.output import Output

log = logging.getLogger(__name__)

TAKEN_FRAME_BYTES = 2**20

FAREWELL_SECONDS = 0.5
"""How long a client may take to read the last of what was sent."""

_GREETING = settings(
    {
        Setting.MAX_CONCURRENT_STREAMS: streams.MOST_CALLS,
        Setting.INITIAL_WINDOW_SIZE: FIRST_WINDOW_BYTES,
        Setting.MAX_FRAME_SIZE: TAKEN_FRAME_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES,
    }
) + window_update(0, streams.WINDOW_BYTES - FIRST_WINDOW_BYTES)

_PING = frame(Kind.PING, 0, 0, bytes(8))

_NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"This port speaks gRPC, which is HTTP/2.\n"
)


class Owner(streams.Owner, Protocol):
    """What a connection needs of its server."""

    def opened(self, connection: Connection) -> None:
        """A client has come."""

    def closed(self, connection: Connection) -> None:
        """A client has gone."""


class Connection(asyncio.Protocol):
    """Bytes in, frames to the streams; and the end, whoever wants it."""

    _transport: asyncio.Transport
    _output: Output
    _keepalive: Keepalive
    _streams: streams.Streams

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(TAKEN_FRAME_BYTES)
        self._closed = False
        self._farewell: asyncio.TimerHandle | None = None
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none by their class.
        self._transport = cast(asyncio.Transport, transport)
        self._peer = _peer_of(transport)
        self._output = Output(self._loop, self._transport)
        self._output.put(_GREETING)
        self._keepalive = Keepalive(partial(self._output.put, _PING), self._transport.abort)
        self._streams = streams.Streams(self._owner, self._output, self._peer)
        self._owner.opened(self)

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
        self._streams.lose()
        self._keepalive.close()
        if self._farewell is not None:
            self._farewell.cancel()
        self._owner.closed(self)

    def pause_writing(self) -> None:
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Of the calls that run."""
        return self._streams.tasks

    def leave(self) -> None:
        """Takes no new call; those that run go on."""
        self._streams.leave()

    def cut_off(self) -> None:
        """Ends every call, with a status that lets clients ask another server."""
        self._streams.cut_off()

    def close(self) -> None:
        """Ends the connection behind what was put. What still comes is read and dropped for a while: to close at once
        would make the system drop what the client has not read."""
        if not self._closed:
            self._closed = True
            self._output.close()
            self._farewell = self._loop.call_later(FAREWELL_SECONDS, self._transport.abort)
            if not self._transport.is_closing():
                with suppress(OSError):  # of a client that has gone this very moment
                    self._transport.write_eof()

    def _fail(self, error: ConnectionFailed) -> None:
        log.info("the connection of %s ends: %s", self._peer, error)
        self._streams.lose()
        if self._streams.greeted:
            self._streams.say_farewell(error.code, str(error))
        else:
            self._output.put(_NOT_HTTP2)
        self.close()


def _peer_of(transport: asyncio.BaseTransport) -> str:
    """As gRPC writes addresses."""
    name = transport.get_extra_info("peername") or ("unknown", 0)
    host, port = name[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
