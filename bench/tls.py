"""Measures handshakes of TLS: milliseconds of CPU for each end, without and with a certificate of the client.

`data_path --tls` has the cost of messages, in whole meshes.
"""

from __future__ import annotations

import ssl
import time

from _options import run_bench
from trtmesh.chassis.tls.certificates import Certificates
from trtmesh.chassis.tls.client import H2
from trtmesh.chassis.tls.settings import TlsSettings
from trtmesh.cli.temporary_ca import TemporaryCa, temporary_ca

HANDSHAKES = 200
FLIGHTS = 6


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


def main() -> dict[str, dict[str, float]]:
    with temporary_ca("127.0.0.1") as made:
        return {
            "handshake": handshakes(made, mutual=False),
            "handshake_mutual": handshakes(made, mutual=True),
        }


if __name__ == "__main__":
    run_bench(main)
