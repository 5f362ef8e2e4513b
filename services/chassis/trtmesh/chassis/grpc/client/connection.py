"""A connection to one server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from trtmesh.chassis.addresses import Address
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc.client.call import (
    WINDOW_BYTES,
    ClientCall,
    Ended,
    Method,
    Request,
    Response,
)
from trtmesh.chassis.grpc.client.streams import OpenedStreams
from trtmesh.chassis.http2 import connection
from trtmesh.chassis.http2.connection import CLOSED, TAKEN_FRAME_BYTES, greeting, why_of
from trtmesh.chassis.http2.frames import PREFACE, ConnectionFailed, FrameReader, Setting
from trtmesh.chassis.http2.keepalive import give_up_unacknowledged
from trtmesh.chassis.http2.writer import Output

_GREETING = PREFACE + greeting(Setting.ENABLE_PUSH, 0, WINDOW_BYTES)


class ClientConnection(connection.Connection[OpenedStreams]):
    """A server, as long as it is connected."""

    def __init__(self, address: str, most_message_bytes: int) -> None:
        super().__init__(FrameReader(TAKEN_FRAME_BYTES, b""))
        self._address = address
        self._most_message_bytes = most_message_bytes
        self._heard = asyncio.Event()
        self._problem = ""
        self.connected = False
        """Whether the server's system has answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connected = True
        give_up_unacknowledged(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._streams.greeted:
            self._heard.set()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._refuse(f"{self._address} closed the connection before it greeted")

    async def greeted(self) -> None:
        """Returns when the server has sent its settings. Raises Unavailable where none speaks HTTP/2 there."""
        await self._heard.wait()
        if self._problem:
            raise Unavailable(self._problem)

    def open(
        self, method: Method[Request, Response], deadline_seconds: float | None = None
    ) -> ClientCall[Request, Response]:
        """Begins a call, whose deadline the server is told. Raises Unavailable."""
        return self._streams.open(method, self._address, deadline_seconds)

    async def ask(
        self, method: Method[Request, Response], request: Request, within_seconds: float
    ) -> Response:
        """One message for one message. Raises AioRpcError and Unavailable."""
        call = self.open(method, within_seconds)
        try:
            async with asyncio.timeout(within_seconds):
                # A server may answer before it has taken all of a request.
                with suppress(Ended):
                    await call.write(request)
                call.half_close()
                answer = await call.read()
                if answer is None or await call.read() is not None:
                    raise Unavailable(f"{method.path} was not answered with one message")
                return answer
        except TimeoutError:
            raise Unavailable(
                f"{method.path} was not answered within {within_seconds:g} s"
            ) from None
        finally:
            call.cancel()

    def abort(self) -> None:
        """Closes the connection at once, which cancels its calls on the server too. Also where it is being made."""
        if self.connected:
            self._streams.lose(CLOSED)
            self._transport.abort()
            # uvloop forgets who waits for a connection when it is not wanted any more, and keeps the two together.
            self.connection_lost(None)
            self._transport.set_protocol(asyncio.Protocol())

    def _open(self, output: Output, peer: str) -> OpenedStreams:
        output.put(_GREETING)
        return OpenedStreams(output, peer, self._most_message_bytes)

    def _fail(self, error: ConnectionFailed) -> None:
        self._refuse(f"{self._address} is no gRPC server: {error}")
        self._streams.lose(f"it broke a rule of HTTP/2: {error}")
        self._streams.say_farewell(error.code, 0, str(error))
        self.close()

    def _refuse(self, problem: str) -> None:
        if not self._heard.is_set():
            self._problem = problem
            self._heard.set()


@asynccontextmanager
async def connected(
    address: str, most_message_bytes: int, within_seconds: float
) -> AsyncIterator[ClientConnection]:
    """A connection to `address`, a host and a port, that is closed in the end. Raises Unavailable where nothing greets
    there in time."""
    made = ClientConnection(address, most_message_bytes)
    try:
        await _connect(made, address, within_seconds)
        yield made
    finally:
        made.abort()


async def _connect(made: ClientConnection, address: str, within_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    try:
        host, port = Address.parse(address)
        async with asyncio.timeout(within_seconds):
            await loop.create_connection(lambda: made, host, port)
            await made.greeted()
    except TimeoutError:
        what = "greet" if made.connected else "answer"
        raise Unavailable(f"{address} did not {what} within {within_seconds:g} s") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"cannot connect to {address}: {_why_refused(error)}") from None


def _why_refused(error: Exception) -> str:
    """asyncio and uvloop say it each in its own words; the system's are the same."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    return why_of(error)
