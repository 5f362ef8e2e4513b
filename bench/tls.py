"""Measures what TLS costs: messages over plain text and over TLS, and handshakes.

Prints microseconds of CPU for a message of 64 bytes and its echo, both ends in one process, with one call (one write a
message) and with 64 (writes merged); and milliseconds of CPU for each end of a handshake, without and with a
certificate of the client. `data_path --tls` compares whole meshes.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import asyncio
import json
import ssl
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import uvloop
from trtmesh.chassis.grpc.client import Method, connected
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.tls.certificates import Certificates
from trtmesh.chassis.tls.client import H2, PeerTls
from trtmesh.chassis.tls.settings import TlsSettings
from trtmesh.cli.temporary_ca import TemporaryCa, temporary_ca

MAX_MESSAGE_BYTES = 2**20
CHAT = Method("/bench.Tls/Chat", bytes, bytes)
MESSAGE = bytes(64)
MESSAGES = {1: 3000, 64: 100}
"""Messages of each call, by calls."""
RUNS = 5
HANDSHAKES = 200
FLIGHTS = 6


async def _chat(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@asynccontextmanager
async def serving(settings: TlsSettings) -> AsyncIterator[str]:
    """Runs a server that echoes; yields its address."""
    server = GrpcServer(MAX_MESSAGE_BYTES, tls=Certificates(settings, "router").server(H2))
    handler: Any = grpc.stream_stream_rpc_method_handler(_chat)
    server.add_registered_method_handlers("bench.Tls", {"Chat": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


async def message_cost(address: str, tls: PeerTls | None, calls: int) -> float:
    """Microseconds of CPU for a message and its echo."""
    async with connected(address, MAX_MESSAGE_BYTES, 10.0, tls) as connection:
        opened = [connection.open(CHAT) for _ in range(calls)]

        async def talk(call: Any) -> None:
            for _ in range(MESSAGES[calls]):
                await call.write(MESSAGE)
                await call.read()

        before = time.process_time()
        await asyncio.gather(*map(talk, opened))
        used = time.process_time() - before
        for call in opened:
            call.cancel()
    return used / calls / MESSAGES[calls] * 1e6


async def messages(made: TemporaryCa, calls: int) -> dict[str, float]:
    """The medians of alternated runs, and their ratio."""
    secure = TlsSettings(certificate=made.certificate, key=made.key, client_ca=made.ca)
    tls = made.client.peer_tls()
    async with serving(TlsSettings()) as plain_address, serving(secure) as tls_address:
        pairs = [
            (
                await message_cost(plain_address, None, calls),
                await message_cost(tls_address, tls, calls),
            )
            for _ in range(RUNS)
        ]
    plain, encrypted = (statistics.median(kind) for kind in zip(*pairs, strict=True))
    ratio = round(encrypted / plain, 2)
    return {"plain_us": round(plain, 1), "tls_us": round(encrypted, 1), "ratio": ratio}


def handshakes(made: TemporaryCa, *, mutual: bool) -> dict[str, float]:
    """Milliseconds of CPU of each end, in memory."""
    client_ca = made.ca if mutual else None
    settings = TlsSettings(certificate=made.certificate, key=made.key, client_ca=client_ca)
    server = Certificates(settings, "router").server(H2)
    assert server is not None
    contexts = {"client": made.client.context(), "server": server.context()}
    used = dict.fromkeys(contexts, 0.0)
    for _ in range(HANDSHAKES):
        _shake_hands(contexts, made.client.server_name, used)
    return {f"{end}_ms": round(seconds / HANDSHAKES * 1e3, 2) for end, seconds in used.items()}


def _shake_hands(
    contexts: dict[str, ssl.SSLContext], server_name: str, used: dict[str, float]
) -> None:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        "client": contexts["client"].wrap_bio(to_client, to_server, server_hostname=server_name),
        "server": contexts["server"].wrap_bio(to_server, to_client, server_side=True),
    }
    for _ in range(FLIGHTS):
        for name, end in list(ends.items()):
            before = time.process_time()
            try:
                end.do_handshake()
                del ends[name]
            except ssl.SSLWantReadError:
                pass
            used[name] += time.process_time() - before


async def main() -> None:
    with temporary_ca("127.0.0.1") as made:
        figures = {f"calls_{calls}": await messages(made, calls) for calls in MESSAGES}
        figures["handshake"] = handshakes(made, mutual=False)
        figures["handshake_mutual"] = handshakes(made, mutual=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
