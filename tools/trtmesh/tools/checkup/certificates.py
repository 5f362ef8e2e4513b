"""Certificates, checked as peers check them: by a handshake in memory. No key or certificate is shown or kept."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ShownCertificate:
    """What a certificate says, or why a peer refuses it."""

    names: tuple[str, ...] = ()
    ends: float = 0.0
    """In seconds since 1970 UTC; 0 for unknown."""
    refusal: str = ""


def own_certificate(certificate: Path, key: Path | None) -> ShownCertificate:
    """Reads a certificate. A wrong date is a refusal. Raises OSError and ssl.SSLError for unusable files."""
    client = _client()
    # The certificate vouches for itself, so only its dates are checked.
    client.load_verify_locations(cafile=str(certificate))
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return _shown(_handshake(_server(certificate, key), client, ""))


def as_peers_see(certificate: Path, key: Path | None, ca: Path, name: str) -> ShownCertificate:
    """Checks a certificate by an authority; `name` must be in it unless empty. Raises OSError and ssl.SSLError."""
    client = _client()
    client.load_verify_locations(cafile=str(ca))
    client.check_hostname = bool(name)
    return _shown(_handshake(_server(certificate, key), client, name))


def shown_in(peer: Mapping[str, Any]) -> ShownCertificate:
    """Reads what `getpeercert` returns."""
    names = tuple(str(value) for _, value in peer.get("subjectAltName", ()))
    ends = ssl.cert_time_to_seconds(peer["notAfter"]) if "notAfter" in peer else 0.0
    return ShownCertificate(names, float(ends))


def _client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return context


def _server(certificate: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A key with a passphrase would otherwise ask for it on the terminal.
    context.load_cert_chain(certificate, key, password="")
    return context


def _shown(peer: Mapping[str, Any] | str) -> ShownCertificate:
    return ShownCertificate(refusal=peer) if isinstance(peer, str) else shown_in(peer)


def _handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str
) -> Mapping[str, Any] | str:
    """Returns the server's certificate, or why the client refuses it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name or None)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(8):
            for side in (one, other):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
            if one.version() is not None and (peer := one.getpeercert()):
                return peer
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    raise ssl.SSLError("the handshake does not end")
