"""A connection to a server, with the calls."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from trtmesh.chassis import addresses
from trtmesh.chassis.addresses import Address, AddressCheck
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.fair.limits import Budget
from trtmesh.chassis.fair.turns import ParseScheduler
from trtmesh.chassis.grpc.client.call import (
    WINDOW_SIZE,
    ClientCall,
    Connection,
    Method,
    Request,
    Response,
)
from trtmesh.chassis.grpc.client.headers import request_headers
from trtmesh.chassis.grpc.messages import Memory
from trtmesh.chassis.http2 import rates
from trtmesh.chassis.http2.connection import (
    CLOSE_SECONDS,
    CLOSED,
    Http2Connection,
    initial_settings,
    reason_of,
    set_user_timeout,
)
from trtmesh.chassis.http2.frames import (
    PREFACE,
    ErrorCode,
    Http2ConnectionError,
    Setting,
    goaway,
)
from trtmesh.chassis.http2.headers import HeaderBlock
from trtmesh.chassis.tasks import deadline
from trtmesh.chassis.tls.client import H2, PeerTls
from trtmesh.chassis.tls.pem import reason_of_tls

SHORT_BYTES = 2**12
"""Largest read that needs no turn: a peer cannot make it cost more than a message does in any case, and to take a turn
costs a fifth of a worker's step."""

BETWEEN_BYTES = 2**16

HELD_MESSAGES = 4
"""Most unread bytes of all calls together, in messages of the largest size."""

BULK_WINDOW_SIZE = 2**22
"""Flow-control window of a call with large messages: the next arrives while a message is copied."""


class ClientConnection(Http2Connection[ClientCall[Any, Any]], Connection):
    """Opens calls on a server until either side closes the connection."""

    _memory: Memory | None = None
    _window_size = WINDOW_SIZE
    """Of each call."""
    _short_bytes = SHORT_BYTES

    def __init__(self, address: str, max_message_bytes: int, turns: ParseScheduler) -> None:
        super().__init__(b"", turns, Budget(HELD_MESSAGES * max_message_bytes))
        self._address = address
        self._max_message_bytes = max_message_bytes
        self._max_concurrent_streams: int | None = None
        self._handshake = asyncio.Event()
        self._handshake_problem = ""
        self._refusal = ""
        """Why no more calls can be opened."""
        self._secured = False
        self.established = False
        """Whether there is a connection, over TLS after the handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.writer.send(PREFACE + initial_settings(Setting.ENABLE_PUSH, 0, self._window_size))
        self.established = True
        secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secured is not None:
            self._secured = True
            self._check_protocol(secured)
        set_user_timeout(transport.get_extra_info("socket"))

    def _check_protocol(self, secured: ssl.SSLObject) -> None:
        if secured.selected_alpn_protocol() != H2:
            self._fail_handshake(f"{self._address} does not offer {H2} by ALPN: it is no gRPC port")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        # A server judges a certificate after the client's part of the handshake, and uvloop sends no alert.
        why = "; does it accept this client's certificate?" if self._secured else ""
        self._fail_handshake(f"{self._address} closed the connection before its SETTINGS{why}")

    async def handshake(self) -> None:
        """Waits for the server's SETTINGS. Raises Unavailable if the server does not speak HTTP/2."""
        await self._handshake.wait()
        if self._handshake_problem:
            raise Unavailable(self._handshake_problem)

    def open(
        self, method: Method[Request, Response], timeout_seconds: float | None = None
    ) -> ClientCall[Request, Response]:
        if self._refusal:
            raise Unavailable(self._refusal)
        most = self._max_concurrent_streams
        if most is not None and len(self._streams) >= most:
            raise Unavailable(f"the server allows at most {most} concurrent calls")
        stream_id = self._last_stream_id = self._last_stream_id + 2 if self._last_stream_id else 1
        self.rates.note_opened()
        stream = self.writer.open_stream(stream_id)
        call = self._streams[stream_id] = ClientCall(
            method,
            stream,
            self.writer,
            partial(self.send_window_update, stream_id),
            partial(self.forget, stream_id),
            self._max_message_bytes,
            self.queue,
            self.account,
            self._window_size,
            self._memory,
        )
        headers = request_headers(method.path, self._address, timeout_seconds)
        self.writer.send_headers(stream, headers)
        return call

    def abort(self) -> None:
        """Closes the connection at once, even during connecting. The server cancels the calls."""
        if self.established:
            self._disconnect_streams(CLOSED)
            self._transport.abort()
            # When connecting is cancelled, uvloop keeps protocol and transport in a reference cycle.
            self.connection_lost(None)
            self._transport.set_protocol(asyncio.Protocol())

    def _greet(self) -> None:
        """A client has sent SETTINGS on connecting."""

    def _fail(self, error: Http2ConnectionError) -> None:
        self._fail_handshake(f"{self._address} is not a gRPC server: {error}")
        self._disconnect_streams(f"the server violated HTTP/2: {error}")
        self.writer.send(goaway(0, error.code, str(error)))
        self.close()

    def _fail_handshake(self, problem: str) -> None:
        if not self._handshake.is_set():
            self._handshake_problem = problem
            self._handshake.set()

    def _disconnect_streams(self, reason: str) -> None:
        self._refusal = self._refusal or reason
        super()._disconnect_streams(self._refusal)

    def _receive_header_block(self, block: HeaderBlock) -> None:
        if block.stream_id % 2 == 0 or block.stream_id > self._last_stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "HEADERS on an idle stream")
        if (call := self._streams.get(block.stream_id)) is None:
            self.rates.count(rates.CLOSED_STREAM)
        else:
            call.receive_header_block(block)
            if not call.headers_received and block.stream_id in self._streams:
                self.rates.count(rates.INFORMATION)

    def _receive_goaway(self, last_stream_id: int, code: ErrorCode, debug_data: str) -> None:
        self._refusal = f"the server sent GOAWAY: {code.name}" + (debug_data and f": {debug_data}")
        for stream_id, call in list(self._streams.items()):
            if stream_id > last_stream_id:
                call.disconnect(self._refusal)

    def _take_settings(self, values: Mapping[int, int]) -> None:
        most = values.get(Setting.MAX_CONCURRENT_STREAMS)
        if most is not None:
            self._max_concurrent_streams = most
        self._handshake.set()


class BulkConnection(ClientConnection, asyncio.BufferedProtocol):
    """Receives large messages straight into given memory."""

    _window_size = BULK_WINDOW_SIZE

    def __init__(
        self, address: str, max_message_bytes: int, turns: ParseScheduler, memory: Memory
    ) -> None:
        super().__init__(address, max_message_bytes, turns)
        self._memory = memory
        self._between = memoryview(bytearray(BETWEEN_BYTES))
        """Memory for the bytes between large messages."""
        self._given = self._between

    def get_buffer(self, sizehint: int) -> memoryview:
        """Memory for the next bytes."""
        reader = self._reader
        call = self._streams.get(reader.data_stream) if reader.data_missing else None
        room = call.room if call else None
        self._given = self._between if room is None else room[: reader.data_missing]
        return self._given

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._given[:nbytes])


@asynccontextmanager
async def connected(
    address: str,
    max_message_bytes: int,
    timeout_seconds: float,
    tls: PeerTls | None = None,
    memory: Memory | None = None,
    check: AddressCheck | None = None,
    turns: ParseScheduler | None = None,
) -> AsyncIterator[ClientConnection]:
    """Connects to `address` (host:port), over TLS if given, and closes the connection in the end. Large messages are
    received into `memory`, if given; `check` refuses IP addresses; `turns` are shared with other connections, if given.
    Raises Unavailable if connecting and handshake fail or take too long, not counting pauses of this process."""
    turns = turns or ParseScheduler()
    connection = (
        BulkConnection(address, max_message_bytes, turns, memory)
        if memory
        else ClientConnection(address, max_message_bytes, turns)
    )
    try:
        await _connect(connection, address, timeout_seconds, tls, check)
        yield connection
    finally:
        connection.abort()


async def _connect(
    connection: ClientConnection,
    address: str,
    timeout_seconds: float,
    tls: PeerTls | None,
    check: AddressCheck | None,
) -> None:
    secure: dict[str, Any] = {}
    try:
        parsed = host, port = Address.parse(address)
        async with deadline(timeout_seconds):
            if tls is not None:
                secure = {
                    "ssl": tls.context,
                    "server_hostname": tls.name or host,
                    "ssl_shutdown_timeout": CLOSE_SECONDS,
                }
            hosts = [host] if check is None else await _checked(parsed, check)
            await _dial(connection, hosts, port, secure)
            await connection.handshake()
    except TimeoutError:
        step = "complete a TLS handshake" if tls else "accept a connection"
        missing = "sent no SETTINGS" if connection.established else f"did not {step}"
        raise Unavailable(f"{address} {missing} within {timeout_seconds:g} s") from None
    except ssl.SSLError as error:
        raise Unavailable(f"no TLS connection to {address}: {reason_of_tls(error)}") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"cannot connect to {address}: {_connect_problem(error)}") from None


async def _dial(
    connection: ClientConnection, hosts: Sequence[str], port: int, secure: Mapping[str, Any]
) -> None:
    """Connects to the first accepting host. Raises OSError."""
    create = asyncio.get_running_loop().create_connection
    *others, last = hosts
    for host in others:
        try:
            await create(lambda: connection, host, port, **secure)
        except ssl.SSLError:
            raise
        except OSError:
            continue
        return
    await create(lambda: connection, last, port, **secure)


async def _checked(address: Address, check: AddressCheck) -> Sequence[str]:
    """Returns the addresses to dial, looked up once: the check covers the addresses in use."""
    found = await addresses.resolved(address)
    for each in found:
        check(address, each)
    return found


def _connect_problem(error: Exception) -> str:
    """The system's text: asyncio and uvloop word their errors differently."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    return reason_of(error)
