"""One client's connection."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from trtmesh.chassis.grpc.server import streams
from trtmesh.chassis.grpc.server.streams import ServedStreams
from trtmesh.chassis.http2 import connection
from trtmesh.chassis.http2.connection import TAKEN_FRAME_BYTES, greeting
from trtmesh.chassis.http2.frames import (
    FIRST_WINDOW_BYTES,
    PREFACE,
    ConnectionFailed,
    FrameReader,
    Setting,
)
from trtmesh.chassis.http2.writer import Output

log = logging.getLogger(__name__)

_GREETING = greeting(Setting.MAX_CONCURRENT_STREAMS, streams.MOST_CALLS, FIRST_WINDOW_BYTES)

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


class Connection(connection.Connection[ServedStreams]):
    """A client, as long as it is connected."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(FrameReader(TAKEN_FRAME_BYTES, PREFACE))
        self._owner = owner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._owner.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._owner.closed(self)

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

    def _open(self, output: Output, peer: str) -> ServedStreams:
        output.put(_GREETING)
        return ServedStreams(self._owner, output, peer)

    def _fail(self, error: ConnectionFailed) -> None:
        log.info("the connection of %s ends: %s", self._peer, error)
        self._streams.lose(str(error))
        if self._streams.greeted:
            self._streams.fail(error.code, str(error))
        else:
            self._output.put(_NOT_HTTP2)
        self.close()
