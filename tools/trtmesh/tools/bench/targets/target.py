"""What is measured: a server behind one protocol."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtmesh.chassis.bearer import ApiKey
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.tools.bench.reception import Reception
from trtmesh.tools.bench.record import Plan

DEFAULT_PORTS = {"grpc": 8001, "triton": 8001, "triton+unary": 8001, "triton+http": 8000, "openai": 8000}  # fmt: skip

FORMS = (
    "grpc://HOST:PORT, triton://HOST:PORT (streams), triton+unary://HOST:PORT, triton+http://HOST:PORT"
    " (generate_stream) or openai://HOST:PORT, openai://HOST:PORT/v1/completions; over TLS with an s before the colon"
)


@dataclass(frozen=True, slots=True)
class Url:
    """Where a server is, and how to speak to it."""

    protocol: str
    """A key of `DEFAULT_PORTS`."""
    addresses: tuple[str, ...]
    """host:port; several only for `grpc`: routers that continue each other's requests."""
    path: str = ""
    is_secure: bool = False

    @classmethod
    def parse(cls, text: str) -> Url:
        """Raises SettingsError."""
        scheme, mark, rest = text.partition("://")
        protocol = scheme.removesuffix("s")
        if not mark or protocol not in DEFAULT_PORTS:
            raise SettingsError(f"the target is {text!r} but must be {FORMS}")
        hosts, _, path = rest.partition("/")
        if "@" in hosts:
            raise SettingsError("the target has a user or a key in it; give keys by --api-key-file")
        addresses = tuple(_address(host, DEFAULT_PORTS[protocol]) for host in hosts.split(","))
        if len(addresses) > 1 and protocol != "grpc":
            raise SettingsError(f"{protocol}:// takes one address, not {', '.join(addresses)}")
        if path and protocol != "openai":
            raise SettingsError(
                f"{protocol}:// takes no path, such as /{path}; name a model by --model"
            )
        return cls(protocol, addresses, f"/{path}" if path else "", scheme != protocol)

    def __str__(self) -> str:
        secure = "s" if self.is_secure else ""
        return f"{self.protocol}{secure}://{','.join(self.addresses)}{self.path}"


def _address(host: str, port: int) -> str:
    if not host:
        raise SettingsError(f"the target names no host; it must be {FORMS}")
    has_port = ":" in host.rpartition("]")[2]
    return host if has_port else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Connecting:
    """What all connections to a target share."""

    url: Url
    model: str = ""
    api_key_file: Path | None = None
    tls: ClientTls | None = None

    @property
    def api_key(self) -> ApiKey | None:
        """Of the file, else of the environment. Raises SettingsError."""
        return ApiKey.read(self.api_key_file, os.environ)


class Target(Protocol):
    """One connection to a server, open inside `async with`."""

    @property
    def release(self) -> str:
        """Name and version of the server, if it says them."""

    async def answer(self, plan: Plan, reception: Reception) -> None:
        """Sends a request and tells `reception` what arrives, until all its items have ended. Raises TrtmeshError if
        the request fails as a whole."""


OpenTarget = AbstractAsyncContextManager[Target]
