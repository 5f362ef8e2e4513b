"""TLS between the client and a server: a proxy with certificates before a router."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from shutil import which

import pytest
from cli.commands import trtmesh

OPENSSL = which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs openssl to make certificates")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a self-signed certificate and its key for 127.0.0.1."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "chain.pem"))
        subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        command = (str(OPENSSL), "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *subject)
        subprocess.run(command, check=True, capture_output=True)
        return folder

    return make


@asynccontextmanager
async def proxy(server: Path, client: Path, router: str) -> AsyncIterator[str]:
    """The address of a TLS proxy that asks clients for a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client / "chain.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(server / "chain.pem", server / "key.pem")
    context.set_alpn_protocols(["h2"])
    host, port = router.split(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            relay(reader, inner_writer), relay(inner_reader, writer), return_exceptions=True
        )

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as listener:
        yield "{}:{}".format(*listener.sockets[0].getsockname())


async def infer(*arguments: str) -> tuple[int, str, str]:
    words = ("triton", "infer", "--max-tokens", "4", *arguments, "one")
    done = await asyncio.to_thread(trtmesh, *words)
    return done.returncode, done.stdout, done.stderr


async def test_client_and_server_show_certificates(
    router: str, certificates: Callable[[str], Path]
) -> None:
    server, client = map(certificates, ("server", "client"))
    trust = ("--root-certificates", str(server / "chain.pem"))
    own = (
        *("--private-key", str(client / "key.pem")),
        *("--certificate-chain", str(client / "chain.pem")),
    )
    plain = await infer("--url", router)
    async with proxy(server, client, router) as address:
        ask = partial(infer, "--url", address)
        assert await ask(*trust, *own) == plain
        for wrong, words in (
            ((), (1, "it speaks TLS, wants a certificate")),
            (trust, (1, "wants a certificate")),
            (("--tls", *own), (2, "its certificate is not trusted")),
        ):
            status, out, err = await ask(*wrong)
            assert (status, out) == (words[0], ""), err
            assert words[1] in err
            assert "--url" in err
            assert "--root-certificates" in err
