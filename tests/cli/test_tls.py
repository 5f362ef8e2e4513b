"""`trtmesh up --tls` and the options of commands that connect to it."""

from __future__ import annotations

import json
import os
import signal
import ssl
import stat
import urllib.request
from contextlib import suppress
from pathlib import Path

from cli.commands import running_stack, trtmesh
from forks import fork_server, start_module
from trtmesh.cli.temporary_ca import temporary_ca

PATIENCE_SECONDS = 60.0
PROBE = "trtmesh.chassis.probe"


def probe(address: str, **env: str) -> str:
    given = {**os.environ, **env}
    with start_module(fork_server((PROBE,)), PROBE, [address], given, text=True) as process:
        told, _ = process.communicate()
    return str(told.split()[0]) if process.returncode == 0 else "refused"


def test_stack_over_tls() -> None:
    with running_stack("--tls", "--port", "0", "--http-port", "0") as stack:
        router = stack.wait_ready()
        ready = json.loads(stack.wait_for('"ready"'))
        ca = Path(ready["ca"])
        private = ca.parent
        assert stat.S_IMODE(private.stat().st_mode) == 0o700

        generate = ("generate", "--router", router, "--max-tokens", "2", "hi")
        assert trtmesh(*generate, "--ca", str(ca)).returncode == 0
        assert trtmesh(*generate, env={"TRTMESH_TLS_CA": str(ca)}).returncode == 0
        assert trtmesh(*generate).returncode == 1
        # The system does not know the authority.
        assert trtmesh(*generate, "--tls").returncode == 2
        status = ("status", "--admin", ready["admin"])
        assert trtmesh(*status, "--ca", str(ca)).returncode == 0
        assert trtmesh(*status).returncode == 1
        wrong = trtmesh(*status, "--ca", str(private / "missing.pem"))
        assert wrong.returncode == 2
        assert "--ca is" in wrong.stderr

        url = f"https://{ready['http']}/v2/health/ready"
        trusting = ssl.create_default_context(cafile=str(ca))
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS, context=trusting) as response:
            assert response.status == 200

        assert probe(router, TRTMESH_TLS_CA=str(ca)) == "SERVING"
        assert probe(router) == "refused"
        # Engines and tokenizers ask everyone for a certificate.
        for child in stack.children:
            if child["service"] != "router":
                assert probe(str(child["address"]), TRTMESH_TLS_CA=str(ca)) == "refused"
        stack.signal(signal.SIGINT)
        assert stack.wait() == 0
        assert not private.exists()


def test_strict_clients_accept_the_throw_away_certificates() -> None:
    """As Python's own default is since 3.13."""
    with temporary_ca("127.0.0.1") as paper:
        context = ssl.create_default_context(cafile=str(paper.ca))
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served.load_cert_chain(paper.certificate, paper.key)
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(down, up, server_hostname="127.0.0.1")
        server = served.wrap_bio(up, down, server_side=True)
        for side in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        assert client.getpeercert()
