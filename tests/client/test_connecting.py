"""Errors of clients that do not get a connection, or get one to something else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from certificates import Authority
from client.scripted import ScriptedRouter
from trtmesh.chassis.connecting import WrongConnection, WrongService, connection_error
from trtmesh.chassis.errors import SettingsError, TrtmeshError, Unavailable, Unsupported
from trtmesh.client import AdminClient, Client, ClientTls


@pytest.mark.parametrize("kind", [Client, AdminClient])
@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("127.0.0.1:99999", "its port is '99999' but must be a number from 1 to 65535"),
        ("127.0.0.1:", "its port is ''"),
        ("", "it is empty"),
        ("http://127.0.0.1:8001", "leave out 'http://'"),
        ("127.0.0.1", "it has no port; add one after a colon"),
        ("::1:80", "an IPv6 address needs brackets"),
        ("a b:80", "'a b' is no name of a host"),
    ],
)
def test_address_is_checked_before_anything_is_sent(
    kind: type[Client | AdminClient], address: str, remedy: str
) -> None:
    with pytest.raises(SettingsError, match=r"^address is .* but must be host:port: ") as caught:
        kind(address)
    assert repr(address) in str(caught.value)
    assert remedy in str(caught.value)


async def failure_of(address: str, tls: ClientTls | None = None) -> TrtmeshError:
    async with Client(address, tls=tls) as client:
        with pytest.raises(TrtmeshError) as caught:
            await client.complete(["x"])
    assert str(caught.value).startswith(f"{address}: ")
    assert "ipv4:" not in str(caught.value)
    return caught.value


async def test_absent_router_is_told_from_a_wrong_one() -> None:
    error = await failure_of("127.0.0.1:1")
    assert type(error) is Unavailable
    assert "nothing listens there" in str(error)


@pytest.fixture
async def http() -> AsyncIterator[str]:
    """A server of HTTP/1.1."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    server.close()


async def test_port_without_grpc_is_named(http: str) -> None:
    error = await failure_of(http)
    assert type(error) is WrongConnection
    assert "it serves no gRPC: name a port for gRPC" in str(error)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[tuple[Authority, str]]:
    """A port with TLS, and the authority of its certificate."""
    authority = Authority(tmp_path)
    pair = authority.issue("router")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    context.set_alpn_protocols(["h2"])

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0, ssl=context)
    yield authority, "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    server.close()


async def test_tls_that_does_not_fit_is_explained(
    secured: tuple[Authority, str], tmp_path: Path, http: str
) -> None:
    authority, address = secured
    untrusted = await failure_of(address, ClientTls(Authority(tmp_path / "other").ca))
    assert type(untrusted) is WrongConnection
    assert "its certificate is not trusted" in str(untrusted)
    misnamed = await failure_of(address, ClientTls(authority.ca, server_name="nobody"))
    assert type(misnamed) is WrongConnection
    assert "its certificate has another name" in str(misnamed)
    plain = await failure_of(http, ClientTls(authority.ca))
    assert type(plain) is WrongConnection
    assert "it speaks plain text" in str(plain)
    assert "it speaks TLS" in str(await failure_of(address))


async def test_server_of_something_else_is_named(router: ScriptedRouter, client: Client) -> None:
    async with AdminClient(client.address) as admin:
        with pytest.raises(WrongService, match="it does not serve this call") as caught:
            await admin.list_workers()
    assert isinstance(caught.value, Unsupported)
    assert client.address in str(caught.value)


LAST = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("errors resolving no.invalid:80: [field:hostname lookup error:...]", "cannot be resolved"),
        ("DNS resolution failed for x:1: C-ares status is not ARES_SUCCESS", "cannot be resolved"),
        (LAST + "FAILED_PRECONDITION: addr: ipv4:10.1.2.3:80 error: Network is unreachable", "cannot be reached"),
        (LAST + "UNKNOWN: connection attempt timed out before receiving SETTINGS frame", "does not answer"),
        (LAST + "UNKNOWN: ipv4:127.0.0.1:1: Cannot check peer: missing selected ALPN property.", "serves no gRPC"),
        (LAST + "UNKNOWN: a new one", "a new one"),
    ],
)  # fmt: skip
def test_words_of_grpc_are_translated(details: str, words: str) -> None:
    error = connection_error("h:1", details)
    assert words in str(error)


def test_other_failures_keep_their_words() -> None:
    assert connection_error("h:1", "a proxy said so") is None
