"""A gRPC port over TLS, to grpc.aio, to the mesh's own client and to bare sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import socket
import ssl
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import time
from typing import Any

import grpc
import pytest
import uvloop
from certificates import DAY, Authority
from chassis.tls.conftest import MOST_BYTES, SERVICE, Paper, serving
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc.client import Method, connected
from trtmesh.chassis.http2.frames import PREFACE, settings
from trtmesh.chassis.tls.certificates import HTTP_1_1
from trtmesh.chassis.tls.client import H2, ClientTls
from trtmesh.chassis.tls.listener import TlsListener
from trtmesh.chassis.tls.settings import TlsSettings

PATIENCE_SECONDS = 60.0

Ask = Callable[[str, ClientTls | None], Awaitable[bytes]]


async def ask_aio(address: str, tls: ClientTls | None, method: str = "Echo") -> bytes:
    async with open_channel(address, MOST_BYTES, 2.0, tls) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/{method}")
        answer: bytes = await call(b"hello", timeout=PATIENCE_SECONDS)
        return answer


async def ask_own(address: str, tls: ClientTls | None, method: str = "Echo") -> bytes:
    peer_tls = tls.peer_tls() if tls else None
    async with connected(address, MOST_BYTES, PATIENCE_SECONDS, peer_tls) as connection:
        return await connection.ask(
            Method(f"/{SERVICE}/{method}", bytes, bytes), b"hello", PATIENCE_SECONDS
        )


both_clients = pytest.mark.parametrize("ask", [ask_aio, ask_own])


async def refused(ask: Ask, address: str, tls: ClientTls | None) -> str:
    """Why a client gets nothing."""
    with pytest.raises((grpc.aio.AioRpcError, Unavailable)) as caught:
        await ask(address, tls)
    if isinstance(caught.value, grpc.aio.AioRpcError):
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        return caught.value.details() or ""
    return str(caught.value)


@both_clients
async def test_serves_clients_with_a_certificate(ask: Ask, paper: Paper) -> None:
    async with serving(paper.settings()) as server:
        assert await ask(server.address, paper.client_tls()) == b"hello"


@both_clients
async def test_refuses_every_other_client(ask: Ask, paper: Paper, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "other")
    stranger = other.issue("client")
    expired = paper.authority.issue("expired", valid=-dt.timedelta(hours=1))
    async with serving(paper.settings()) as server:
        for pair in (stranger, expired):
            tls = paper.client_tls(certificate=pair.certificate, key=pair.key)
            await refused(ask, server.address, tls)
        await refused(ask, server.address, paper.client_tls(certificate=None, key=None))
        await refused(ask, server.address, None)
        assert await ask(server.address, paper.client_tls()) == b"hello"


async def test_a_session_ends_with_the_certificate_of_its_client(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS 1.2 resumes it by its id, and checks no certificate then."""
    context = paper.client_tls().context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    def first_bytes(session: Any) -> tuple[bytes, bool | None, Any]:
        """What the server sends, whether it resumed the session, and the session."""
        plain = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
        with context.wrap_socket(plain, server_hostname=host, session=session) as secured:
            # The server speaks after the first frame.
            with contextlib.suppress(OSError):
                secured.sendall(PREFACE + settings({}))
            got, seen = secured.recv(2**10), (secured.session_reused, secured.session)
            # Servers forget the session of a client that does not say farewell.
            with contextlib.suppress(OSError):
                secured.unwrap()
            return got, *seen

    async with serving(paper.settings()) as server:
        host, port = server.address.split(":")
        got, reused, session = await asyncio.to_thread(first_bytes, None)
        assert (bool(got), reused) == (True, False)
        got, reused, _ = await asyncio.to_thread(first_bytes, session)
        assert (bool(got), reused) == (True, True)
        later = time() + 2 * DAY.total_seconds()
        monkeypatch.setattr("trtmesh.chassis.tls.identity.time", lambda: later)
        got, reused, _ = await asyncio.to_thread(first_bytes, session)
        assert (got, reused) == (b"", True)


@both_clients
async def test_clients_refuse_every_other_server(ask: Ask, paper: Paper, tmp_path: Path) -> None:
    expired = paper.authority.issue("late", valid=-dt.timedelta(hours=1))
    other = Authority(tmp_path / "other", "other")
    async with serving(paper.settings()) as server:
        await refused(ask, server.address, paper.client_tls(ca=other.ca))
        await refused(ask, server.address, paper.client_tls(server_name="elsewhere"))
    settings = paper.settings(certificate=expired.certificate, key=expired.key)
    async with serving(settings) as server:
        await refused(ask, server.address, paper.client_tls())


@both_clients
async def test_optional_certificates(ask: Ask, paper: Paper, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "other", "other").issue("client")
    async with serving(paper.settings(client_certificates="optional")) as server:
        assert await ask(server.address, paper.client_tls()) == b"hello"
        nameless = paper.client_tls(certificate=None, key=None)
        assert await ask(server.address, nameless) == b"hello"
        forged = paper.client_tls(certificate=stranger.certificate, key=stranger.key)
        await refused(ask, server.address, forged)


@both_clients
async def test_admits_only_the_client_names(ask: Ask, paper: Paper) -> None:
    router = paper.authority.issue("any", ("router.mesh",))
    async with serving(paper.settings(client_names=("router.mesh",))) as server:
        tls = paper.client_tls(certificate=router.certificate, key=router.key)
        assert await ask(server.address, tls) == b"hello"
        await refused(ask, server.address, paper.client_tls())


async def test_a_peer_name_replaces_the_host(paper: Paper) -> None:
    named = paper.authority.issue("named", ("engine.mesh",))
    async with serving(paper.settings(certificate=named.certificate, key=named.key)) as server:
        for ask in (ask_aio, ask_own):
            tls = paper.client_tls(server_name="engine.mesh")
            assert await ask(server.address, tls) == b"hello"


async def test_handlers_see_who_calls_as_over_grpc_aio(paper: Paper) -> None:
    peer = paper.authority.issue("alice", ("alice.example",))
    tls = paper.client_tls(certificate=peer.certificate, key=peer.key)
    async with serving(paper.settings()) as server:
        seen = eval(await ask_own(server.address, tls, "Who"))
    assert seen["x509_common_name"] == [b"alice"]
    names = set(seen["x509_subject_alternative_name"])
    assert names == {b"alice.example", b"localhost", b"127.0.0.1"}
    assert seen["transport_security_type"] == [b"ssl"]


def hello(server: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    host, _, port = server.rpartition(":")
    bare = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
    try:
        return context.wrap_socket(bare, server_hostname=host, suppress_ragged_eofs=False)
    except OSError:
        bare.close()
        raise


def bare_context(paper: Paper, **given: object) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(paper.authority.ca))
    context.load_cert_chain(paper.client.certificate, paper.client.key)
    for name, value in given.items():
        setattr(context, name, value)
    return context


async def test_refuses_old_versions_and_weak_suites(paper: Paper) -> None:
    with warnings.catch_warnings(action="ignore"):
        old = bare_context(paper, minimum_version=ssl.TLSVersion.TLSv1)
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    weak = bare_context(paper, maximum_version=ssl.TLSVersion.TLSv1_2)
    weak.set_ciphers("ECDHE+AES:!AESGCM:!AESCCM:@SECLEVEL=0")
    strong = bare_context(paper, maximum_version=ssl.TLSVersion.TLSv1_2)
    strong.set_alpn_protocols(["h2"])
    async with serving(paper.settings()) as server:
        for context in (old, weak):
            context.set_alpn_protocols(["h2"])
            with pytest.raises(OSError):  # noqa: PT011 - an alert or a closed connection
                await asyncio.to_thread(hello, server.address, context)
        (await asyncio.to_thread(hello, server.address, strong)).close()


@pytest.mark.parametrize("protocols", [[], ["http/1.1"]])
async def test_closes_connections_without_h2(
    paper: Paper, protocols: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    context = bare_context(paper)
    if protocols:
        context.set_alpn_protocols(protocols)

    def read() -> bytes:
        with hello(server.address, context) as bare:
            return bare.recv(100)

    async with serving(paper.settings()) as server:
        assert await asyncio.to_thread(read) == b""
    assert "it does not offer h2 by ALPN" in caplog.text


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [(["h2"], "h2"), (["h2", "http/1.1"], "http/1.1"), (["http/1.1"], "http/1.1"), ([], None)],
)
async def test_port_of_both_protocols_speaks_http1_to_browsers(
    paper: Paper, offered: list[str], chosen: str | None
) -> None:
    """They offer HTTP/2 too, which is gRPC's here."""
    context = bare_context(paper)
    if offered:
        context.set_alpn_protocols(offered)
    async with serving(paper.settings(), HTTP_1_1, H2) as server:
        with await asyncio.to_thread(hello, server.address, context) as bare:
            assert bare.selected_alpn_protocol() == chosen


async def test_closes_plain_text_quickly(paper: Paper, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(paper.settings()) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
    assert "speaks plain text" in caplog.text
    assert "Traceback" not in caplog.text


async def test_ends_idle_handshakes(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtmesh.chassis.tls.listener.HANDSHAKE_SECONDS", 0.2)
    async with serving(paper.settings()) as server:
        host, _, port = server.address.rpartition(":")
        for first in (b"", b"\x16\x03\x01"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(first)
            async with asyncio.timeout(PATIENCE_SECONDS):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()


async def test_an_idle_flood_from_one_address_keeps_nobody_out(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmesh.chassis.tls.listener.MAX_PENDING", 8)
    monkeypatch.setattr("trtmesh.chassis.tls.listener.HANDSHAKE_SECONDS", 300.0)
    async with serving(paper.settings()) as server:
        host, _, port = server.address.rpartition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(40)]
        assert await ask_own(server.address, paper.client_tls()) == b"hello"
        await asyncio.sleep(0)
        assert sum(map(_is_open, idle)) <= 8
        for each in idle:
            each.close()


async def test_an_idle_flood_from_one_ipv6_network_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its owner may take another address for each connection."""
    monkeypatch.setattr("trtmesh.chassis.tls.listener.MAX_PENDING", 4)
    monkeypatch.setattr("trtmesh.chassis.tls.listener.HANDSHAKE_SECONDS", PATIENCE_SECONDS)
    hosts = ["2001:db8:1::1", *(f"2001:db8:2::{number}" for number in range(6))]
    pairs = [socket.socketpair() for _ in hosts]
    arriving = [(ours, (host, 1, 0, 0)) for (ours, _), host in zip(pairs, hosts, strict=True)]

    class Port:
        def accept(self) -> Any:
            if not arriving:
                raise BlockingIOError
            return arriving.pop(0)

        def fileno(self) -> int:
            return -1

    tls: Any = None
    port: Any = Port()
    listener = TlsListener(port, asyncio.Protocol, tls)
    listener._accept()
    await asyncio.sleep(0.01)
    # The oldest of the busy network had to go, not the client that was first.
    ours, theirs = zip(*pairs, strict=True)
    assert [each.fileno() < 0 for each in ours] == [False, True, True, True, False, False, False]
    listener.close()
    await asyncio.sleep(0.01)
    for each in theirs:
        each.close()


async def test_a_truncated_connection_ends_streams_as_unavailable(paper: Paper) -> None:
    """The server's process dies without a close_notify: a proxy cuts the TCP connection."""
    async with serving(paper.settings()) as server:
        host, _, port = server.address.rpartition(":")
        writers: list[asyncio.StreamWriter] = []

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back_reader, back_writer = await asyncio.open_connection(host, int(port))
            writers.extend((writer, back_writer))
            await asyncio.gather(_pump(reader, back_writer), _pump(back_reader, writer))

        proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        tls = paper.client_tls().peer_tls()
        async with connected(address, MOST_BYTES, PATIENCE_SECONDS, tls) as connection:
            call = connection.open(Method(f"/{SERVICE}/Chat", bytes, bytes))
            await call.write(b"hello")
            assert await call.read() == b"hello"
            for writer in writers:
                writer.close()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        proxy.close()


def _is_open(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except OSError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_server_ends_connections_by_close_notify(
    paper: Paper, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Without it the client could not tell the end from a cut."""
    context = bare_context(paper)
    context.set_alpn_protocols(["h2"])

    def read(address: str) -> bytes:
        with hello(address, context) as bare:
            bare.sendall(b"no HTTP/2 at all, but many bytes of it")
            received = b""
            while data := bare.recv(1000):
                received += data
            return received

    async def serve() -> bytes:
        async with serving(paper.settings()) as server:
            return await asyncio.to_thread(read, server.address)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert b"gRPC" in runner.run(serve())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_stopping_server_leaves_no_connection(
    paper: Paper,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that neither reads nor closes, and one before its handshake, do not keep the server."""
    monkeypatch.setattr("trtmesh.chassis.tls.listener.HANDSHAKE_SECONDS", 300.0)
    settings = paper.settings()

    async def serve() -> None:
        context = bare_context(paper)
        context.set_alpn_protocols(["h2"])
        async with asyncio.timeout(PATIENCE_SECONDS), serving(settings) as server:
            host, _, port = server.address.rpartition(":")
            half = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
            # The server has accepted both, in this order.
            whole = await asyncio.to_thread(hello, server.address, context)
        assert await asyncio.to_thread(half.recv, 1) == b""
        whole.close()
        half.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_stopping_server_leaves_no_refused_connection(
    paper: Paper,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a client that never answers the server's farewell."""
    monkeypatch.setattr("trtmesh.chassis.tls.listener.CLOSE_SECONDS", 300.0)
    settings = paper.settings()

    async def serve() -> None:
        async with serving(settings) as server:
            refused = await asyncio.to_thread(hello, server.address, bare_context(paper))
            assert await asyncio.to_thread(refused.recv, 1) == b""
        with socket.socket(fileno=refused.detach()) as below:
            below.settimeout(PATIENCE_SECONDS)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(below.recv, 1) == b""

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())


async def test_the_client_refuses_a_server_without_h2(paper: Paper) -> None:
    """Such as one of HTTP/1.1: it would wait for a request."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(paper.server.certificate, paper.server.key)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(wait, "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    why = await refused(ask_own, address, paper.client_tls())
    assert why == f"{address} does not offer h2 by ALPN: it is no gRPC port"
    server.close()


async def test_handshakes_wait_for_their_turn(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmesh.chassis.tls.certificates.HANDSHAKES_PER_SECOND", 4.0)
    loop = asyncio.get_running_loop()
    async with serving(paper.settings()) as server:
        begun = loop.time()
        asked = (ask_own(server.address, paper.client_tls()) for _ in range(4))
        assert await asyncio.gather(*asked) == [b"hello"] * 4
        assert loop.time() - begun >= 0.7


async def test_a_client_over_tls_learns_that_a_port_is_plain(
    paper: Paper, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(TlsSettings()) as server:
        assert await ask_own(server.address, None) == b"hello"
        assert "no TLS connection to" in await refused(ask_own, server.address, paper.client_tls())
    assert "the client speaks TLS" in caplog.text


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_large_messages_reach_given_memory(
    paper: Paper, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """As KV does between engines."""
    sent = [bytes((number,)) * (100_000 * number + number) for number in range(1, 9)]

    async def chat() -> list[bytes]:
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            serving(paper.settings()) as server,
            connected(
                *(server.address, MOST_BYTES, PATIENCE_SECONDS, paper.client_tls().peer_tls()),
                lambda size: memoryview(bytearray(size)),
            ) as connection,
        ):
            call = connection.open(Method(f"/{SERVICE}/Chat", bytes, bytes))
            received = []
            for message in sent:
                await call.write(message)
                received.append(await call.read() or b"")
            call.cancel()
            return received

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(chat()) == sent
