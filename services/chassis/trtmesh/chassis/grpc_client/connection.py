"""A connection to one server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc_client.call import Call, Method, Request, Response
from trtmesh.chassis.grpc_client.streams import OpenedStreams
from trtmesh.chassis.grpc_wire import connection
from trtmesh.chassis.grpc_wire.connection import TAKEN_FRAME_BYTES, greeting
from trtmesh.chassis.grpc_wire.frames import PREFACE, ConnectionFailed, FrameReader, Setting
from trtmesh.chassis.grpc_wire.keepalive import give_up_unacknowledged
from trtmesh.chassis.grpc_wire.output import Output

_GREETING = PREFACE + greeting(Setting.ENABLE_PUSH, 0)


class Connection(connection.Connection[OpenedStreams]):
    """A server, as long as it is connected."""

    def __init__(self, address: str, most_message_bytes: int) -> None:
        super().__init__(FrameReader(TAKEN_FRAME_BYTES, b""))
        self._address = address
        self._most_message_bytes = most_message_bytes
        self._heard = asyncio.Event()
        self._problem = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        give_up_unacknowledged(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._streams.greeted:
            self._heard.set()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._refuse("it closed the connection" if error is None else str(error))

    async def greeted(self) -> None:
        """Returns when the server has sent its settings. Raises Unavailable where none speaks HTTP/2 there."""
        await self._heard.wait()
        if self._problem:
            raise Unavailable(f"{self._address} is no gRPC server: {self._problem}")

    def open(
        self, method: Method[Request, Response], deadline_seconds: float | None = None
    ) -> Call[Request, Response]:
        """Begins a call, whose deadline the server is told. Raises Unavailable."""
        return self._streams.open(method, self._address, deadline_seconds)

    async def ask(
        self, method: Method[Request, Response], request: Request, within_seconds: float
    ) -> Response:
        """One message for one message. Raises AioRpcError and Unavailable."""
        call = self.open(method, within_seconds)
        try:
            async with asyncio.timeout(within_seconds):
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
        """Closes the connection at once, which cancels its calls on the server too."""
        self._streams.lose("the connection was closed")
        self._transport.abort()

    def _open(self, output: Output, peer: str) -> OpenedStreams:
        output.put(_GREETING)
        return OpenedStreams(output, peer, self._most_message_bytes)

    def _fail(self, error: ConnectionFailed) -> None:
        self._refuse(str(error))
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
) -> AsyncIterator[Connection]:
    """A connection to `address`, a host and a port, that is closed in the end. Raises Unavailable where nothing greets
    there in time."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    made: Connection | None = None
    try:
        try:
            async with asyncio.timeout(within_seconds):
                _, made = await loop.create_connection(
                    lambda: Connection(address, most_message_bytes), host.strip("[]"), int(port)
                )
                await made.greeted()
        except TimeoutError:
            raise Unavailable(f"{address} did not greet within {within_seconds:g} s") from None
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise Unavailable(f"cannot connect to {address}: {why}") from None
        yield made
    finally:
        if made is not None:
            made.abort()
