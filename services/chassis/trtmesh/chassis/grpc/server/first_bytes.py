"""One port for gRPC and HTTP/1.1: the first bytes of a connection tell which it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias, cast

from trtmesh.chassis.http2.frames import PREFACE

TOLD = PREFACE[:3]
"""No method of HTTP/1.1 begins so."""

Factory: TypeAlias = "Callable[[], asyncio.Protocol]"


class FirstBytes(asyncio.Protocol):
    """A connection until its first bytes. It counts as gRPC's, whose limits of number and time hold."""

    def __init__(self, grpc: asyncio.Protocol, http: Factory) -> None:
        self._chosen, self._http = grpc, http
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._chosen.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < len(TOLD) and TOLD.startswith(self._received):
            return
        if not self._received.startswith(TOLD) and not self._transport.is_closing():
            self._chosen.connection_lost(None)
            self._chosen = self._http()
            self._transport.set_protocol(self._chosen)
            self._chosen.connection_made(self._transport)
        else:
            self._transport.set_protocol(self._chosen)
        self._chosen.data_received(self._received)

    def eof_received(self) -> bool | None:
        return self._chosen.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._chosen.connection_lost(exc)

    def pause_writing(self) -> None:
        self._chosen.pause_writing()

    def resume_writing(self) -> None:
        self._chosen.resume_writing()
