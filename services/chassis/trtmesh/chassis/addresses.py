"""Addresses: parsing, binding, and the cause of a failed bind."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address
from typing import Any, NamedTuple, TypeAlias

import grpc
from trtmesh.chassis.errors import PortInUse, SettingsError, StartupError

DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS = "127.0.0.1:8001", "127.0.0.1:8003"
"""Where a client expects its router, and the router's administration."""

_NAME = re.compile(r"[\w.-]+")
_PORT = re.compile(r"[0-9]{1,5}")

_AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
"""A result of getaddrinfo."""


class Address(NamedTuple):
    """A name or an IP address without brackets, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parses host:port, with brackets around an IPv6 address. Raises ValueError."""
        host, _, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host, good = host[1:-1], _is_ipv6(host[1:-1])
        else:
            good = _NAME.fullmatch(host) is not None
        if not good or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is not host:port: {why_not_address(text)}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    """A host as written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def listen(server: grpc.aio.Server, host: str, port: int, purpose: str = "listen") -> str:
    """Binds `server` before the start. Returns the address with the actual port. Raises StartupError."""
    try:
        return f"{bracketed(host)}:{server.add_insecure_port(f'{bracketed(host)}:{port}')}"
    except RuntimeError as error:
        raise why_not_bound(purpose, host, port) from error


def bind(host: str, port: int, purpose: str = "listen") -> tuple[socket.socket, str]:
    """Opens a listening socket. Returns the socket, and the address with the actual port. Raises StartupError."""
    try:
        listener = _bind(host.strip("[]"), port)
    except OSError as error:
        raise why_not_bound(purpose, host, port) from error
    return listener, f"{bracketed(host)}:{listener.getsockname()[1]}"


def listeners(host: str, port: int) -> list[socket.socket]:
    """Opens sockets on every address of a host, all with one port. Raises OSError if an address is in use or none can
    be bound."""
    taken: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for info in dict.fromkeys(_resolve(host, port)):
            try:
                taken.append(_listener(info, taken[0].getsockname()[1] if taken else port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if not taken:
            raise missing or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError:
        for each in taken:
            each.close()
        raise
    return taken


def port_is_taken(host: str, port: int) -> bool:
    """Whether another process listens on the port."""
    try:
        _bind(host.strip("[]"), port).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def why_not_bound(purpose: str, host: str, port: int) -> StartupError:
    """The error for a failed bind, with the cause found by a second attempt."""
    where = f"cannot {purpose} on {bracketed(host)}:{port}"
    try:
        _bind(host.strip("[]"), port).close()
    except socket.gaierror as error:
        return SettingsError(f"{where}: host {host!r} cannot be resolved: {error.strerror}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return PortInUse(f"{where}: another process uses the port")
        if error.errno == errno.EADDRNOTAVAIL:
            return SettingsError(f"{where}: host {host!r} is not an address of this machine")
        return SettingsError(f"{where}: {error.strerror}")
    return PortInUse(f"{where}: another process used the port until now")


def why_not_address(text: str) -> str:
    """Returns the problem with an invalid address, and the remedy."""
    if not text:
        return "it is empty"
    if "://" in text:
        return f"leave out {text.partition('://')[0] + '://'!r}"
    if _is_ipv6(text) or (":" in text.rpartition(":")[0].strip("[]") and "[" not in text):
        return "an IPv6 address needs brackets, as in [::1]:8001"
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return "it has no port; add one after a colon"
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        return f"its port is {port!r} but must be a number from 1 to 65535"
    return f"{host!r} is no name of a host"


AddressCheck: TypeAlias = "Callable[[Address, str], None]"
"""Refuses to dial an IP address of a host by raising a TrtmeshError."""


async def resolved(address: Address) -> Sequence[str]:
    """The IP addresses of a host, in the order to try them. Raises OSError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    return [str(sockaddr[0]) for *_, sockaddr in found]


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def _bind(host: str, port: int) -> socket.socket:
    return _listener(_resolve(host, port)[0], port)


def _resolve(host: str, port: int) -> Sequence[_AddressInfo]:
    """Raises OSError for a host without addresses."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        # Python encodes the name before the lookup.
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error


def _listener(info: _AddressInfo, port: int) -> socket.socket:
    family, kind, protocol, _, address = info
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address[0], port, *address[2:]))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


ENGINES = ("vllm", "sglang", "trtllm")
"""Engines supported by a bridge."""

MARK = "://"


class ForeignAddress(NamedTuple):
    """The engine at an address; the engine decides the contract."""

    engine: str
    address: Address

    @classmethod
    def parse(cls, text: str) -> ForeignAddress:
        """Parses engine://host:port. Raises ValueError."""
        engine, mark, address = text.partition(MARK)
        if not mark or engine not in ENGINES:
            known = ", ".join(f"{each}{MARK}" for each in ENGINES)
            raise ValueError(f"{text!r} does not begin with one of {known}")
        return cls(engine, Address.parse(address))

    def __str__(self) -> str:
        return f"{self.engine}{MARK}{self.address}"


def is_foreign(text: str) -> bool:
    """Whether an address names an engine's contract, known or not."""
    return MARK in text


def parse_engine(text: str) -> Address | ForeignAddress:
    """Parses the address of an engine, host:port, or of a foreign engine. Raises ValueError."""
    return ForeignAddress.parse(text) if is_foreign(text) else Address.parse(text)


def host_of(parsed: Address | ForeignAddress) -> Address:
    """Returns the host and port of an engine, without the contract."""
    return parsed.address if isinstance(parsed, ForeignAddress) else parsed
