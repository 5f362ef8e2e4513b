"""A server over TLS on a real socket, and certificates for both sides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, KeyPair
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.tls.certificates import Certificates
from trtmesh.chassis.tls.client import H2, ClientTls
from trtmesh.chassis.tls.settings import TlsSettings

MOST_BYTES = 2**20
SERVICE = "example.Secure"


@dataclass(frozen=True)
class Paper:
    """An authority, a certificate of a server and one of a client."""

    authority: Authority
    server: KeyPair
    client: KeyPair

    def settings(self, **given: Any) -> TlsSettings:
        """Settings of a server that asks clients for certificates, unless `given` says otherwise."""
        usual = {
            "certificate": self.server.certificate,
            "key": self.server.key,
            "client_ca": self.authority.ca,
        }
        return TlsSettings(**{**usual, **given})

    def client_tls(self, **given: Any) -> ClientTls:
        usual = {
            "ca": self.authority.ca,
            "certificate": self.client.certificate,
            "key": self.client.key,
        }
        return ClientTls(**{**usual, **given})


@pytest.fixture
def paper(tmp_path: Path) -> Paper:
    authority = Authority(tmp_path / "paper")
    return Paper(authority, authority.issue("server"), authority.issue("client"))


@dataclass
class SecureServer:
    """A server with methods that show what the handler sees."""

    address: str
    certificates: Certificates


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _who(request: bytes, context: Any) -> bytes:
    return repr(dict(context.auth_context())).encode()


async def _chat(requests: Any, context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@asynccontextmanager
async def serving(settings: TlsSettings, *protocols: str) -> AsyncIterator[SecureServer]:
    """A server for gRPC, or for the given protocols."""
    certificates = Certificates(settings, "engine")
    server = GrpcServer(MOST_BYTES, tls=certificates.server(*protocols or (H2,)))
    handlers: dict[str, Any] = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Who": grpc.unary_unary_rpc_method_handler(_who),
        "Chat": grpc.stream_stream_rpc_method_handler(_chat),
    }
    server.add_registered_method_handlers(SERVICE, handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield SecureServer(f"127.0.0.1:{port}", certificates)
    finally:
        await server.stop(grace=None)
