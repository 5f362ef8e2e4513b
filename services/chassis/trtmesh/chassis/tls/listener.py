"""A port over TLS: accepts connections and passes them on after their handshake."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from trtmesh.chassis.fair.limits import origin_of
from trtmesh.chassis.logs import Occasionally
from trtmesh.chassis.tls.certificates import ServerTls
from trtmesh.chassis.tls.client import H2
from trtmesh.chassis.tls.identity import has_expired, identity_of
from trtmesh.chassis.tls.pem import reason_of_tls

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Most connections waiting to be accepted."""

MAX_PENDING = 512
"""Most connections before or in their handshake. A further connection replaces the oldest of the busiest address: no
address can keep others out, and at most this many handshakes end together."""

HANDSHAKE_SECONDS = 5.0
"""Time for a client to wait for a turn and complete the handshake."""

ACCEPTS_PER_PASS = 16
"""Connections accepted in a pass of the event loop."""

NO_DESCRIPTORS_SECONDS = 1.0
"""Pause after the process had no file descriptor left."""

CLOSE_SECONDS = 0.5
"""How long a client may take to answer the end of the TLS connection."""

_HANDSHAKE_RECORD = b"\x16"
"""The first byte of a TLS client."""


@dataclass(slots=True)
class _Visitor:
    """A connection without a finished handshake."""

    connection: socket.socket
    host: str
    """The IPv4 address or IPv6 network: clients choose addresses within a network freely."""
    handed_over: bool = False
    """Whether a transport owns the connection."""


async def serve(
    listener: socket.socket, factory: Callable[[], asyncio.Protocol], tls: ServerTls | None
) -> asyncio.Server | TlsListener:
    """Serves a protocol on a bound socket, over TLS if given, until the result is closed."""
    if tls is None:
        loop = asyncio.get_running_loop()
        return await loop.create_server(factory, sock=listener, backlog=BACKLOG)
    secure = TlsListener(listener, factory, tls)
    secure.open()
    return secure


class TlsListener:
    """Serves a protocol from `open` to `close`."""

    def __init__(
        self, listener: socket.socket, factory: Callable[[], asyncio.Protocol], tls: ServerTls
    ) -> None:
        self._listener = listener
        self._factory = factory
        self._tls = tls
        self._pending: dict[str, dict[asyncio.Task[None], None]] = {}
        """Tasks of connections without a finished handshake by address, the oldest first."""
        self._refused: set[asyncio.Transport] = set()
        """Refused connections that have not ended."""
        self._occasionally = Occasionally(log)

    def open(self) -> None:
        self._listener.settimeout(0)
        self._listener.listen(BACKLOG)
        self._watch()

    def close(self) -> None:
        """Accepts no more connections and ends those that were not handed over."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for tasks in self._pending.values():
            for task in tasks:
                task.cancel()
        for transport in [*self._refused]:
            transport.abort()

    def _watch(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_PASS):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("cannot accept connections: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(NO_DESCRIPTORS_SECONDS, self._watch)
                return
            connection.settimeout(0)
            self._take(connection, origin_of(address[0]))

    def _take(self, connection: socket.socket, host: str) -> None:
        if sum(map(len, self._pending.values())) >= MAX_PENDING:
            busiest = max(self._pending, key=lambda host: len(self._pending[host]))
            oldest = next(iter(self._pending[busiest]))
            # At once: further connections may arrive before the end of the task.
            self._forget(busiest, oldest)
            oldest.cancel()
            self._complain(busiest, f"{MAX_PENDING} wait for handshakes")
        visitor = _Visitor(connection, host)
        task = asyncio.get_running_loop().create_task(self._admit(visitor))
        self._pending.setdefault(host, {})[task] = None
        task.add_done_callback(partial(self._leave, visitor))

    def _leave(self, visitor: _Visitor, task: asyncio.Task[None]) -> None:
        self._forget(visitor.host, task)
        # Here, because a task cancelled at once never runs.
        if not visitor.handed_over:
            visitor.connection.close()

    def _forget(self, host: str, task: asyncio.Task[None]) -> None:
        tasks = self._pending.get(host, {})
        tasks.pop(task, None)
        if not tasks:
            self._pending.pop(host, None)

    async def _admit(self, visitor: _Visitor) -> None:
        """Runs the handshake of a connection. Logs the reason of a failure."""
        problem = ""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                problem = await self._await_turn(visitor)
                problem = problem or await self._shake_hands(visitor)
        except TimeoutError:
            problem = f"no handshake within {HANDSHAKE_SECONDS:g} s"
        except ssl.SSLError as error:
            problem = reason_of_tls(error)
        except OSError as error:
            log.debug("TLS client %s left: %s", visitor.host, error)
        if problem:
            self._complain(visitor.host, problem)

    def _complain(self, host: str, problem: str) -> None:
        self._occasionally("refused", logging.INFO, "refused TLS client %s: %s", host, problem)

    async def _await_turn(self, visitor: _Visitor) -> str:
        """Returns when the handshake may begin, '' or why there is none."""
        await _readable(visitor.connection)
        first = visitor.connection.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionResetError("it sent nothing")
        if first != _HANDSHAKE_RECORD:
            return "it speaks plain text"
        await self._tls.handshakes.turn(visitor.host)
        return ""

    async def _shake_hands(self, visitor: _Visitor) -> str:
        """Hands the connection over and returns '', or closes the connection and returns why."""
        visitor.handed_over = True
        arrival = _Arrival(self._factory, self._tls, self._refused)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: arrival,
            visitor.connection,
            ssl=self._tls.context(),
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=CLOSE_SECONDS,
        )
        return arrival.problem


class _Arrival(asyncio.Protocol):
    """A connection at the end of the handshake."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        tls: ServerTls,
        refused: set[asyncio.Transport],
    ) -> None:
        self._factory = factory
        self._tls = tls
        self._refused = refused
        self.problem = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hands the connection over, unless the client is refused."""
        self.problem = self._find_problem(transport)
        if self.problem:
            # uvloop's transports do not derive from asyncio.Transport.
            self._transport = cast(asyncio.Transport, transport)
            self._refused.add(self._transport)
            transport.close()
            return
        protocol = self._factory()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.problem:
            self._refused.discard(self._transport)

    def _find_problem(self, transport: asyncio.BaseTransport) -> str:
        chosen = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        # Clients of HTTP/1.1 may name no protocol.
        if chosen is None and self._tls.protocols == (H2,):
            return "it does not offer h2 by ALPN"
        if has_expired(transport):
            return "its certificate has expired"
        identity = identity_of(transport)
        names = self._tls.client_names
        if names and identity is not None and not names & identity.all_names:
            return f"its certificate, {str(identity)[:100]!r}, has none of the client_names"
        return ""


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        with suppress(OSError):
            loop.remove_reader(connection)
