"""Certificates for a single run of a local stack, by an authority without a stored key."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.extras import check_extras

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

VALID = dt.timedelta(days=30)
"""Longer than any trial; the certificates are deleted with the stack."""

PEER_NAME = "trtmesh.internal"
"""The name of the processes among themselves."""

LOCAL_NAMES = ("localhost", PEER_NAME)
LOCAL_ADDRESSES = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class TemporaryCa:
    """The files of a stack."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def client(self) -> ClientTls:
        """For the stack's own calls."""
        return ClientTls(self.ca, self.certificate, self.key, PEER_NAME)

    @property
    def server_flags(self) -> tuple[str, ...]:
        """The certificate of a process."""
        return ("--tls-certificate", str(self.certificate), "--tls-key", str(self.key))

    def flags(self, service: str) -> tuple[str, ...]:
        """TLS of a service: routers admit clients without a certificate, the others admit only processes of the
        stack."""
        admits = "optional" if service == "router" else "required"
        return (
            *self.server_flags,
            *("--tls-client-ca", str(self.ca), "--tls-client-certificates", admits),
            *("--tls-ca", str(self.ca), "--tls-peer-name", PEER_NAME),
        )


@contextmanager
def temporary_ca(host: str) -> Iterator[TemporaryCa]:
    """Certificates for `host` and this machine, in a private directory that is removed in the end. Raises StartupError
    without the package `cryptography`."""
    check_extras(["tls"])
    # Only its user may enter a directory that tempfile makes.
    with TemporaryDirectory(prefix="trtmesh-tls-") as directory:
        yield _make(Path(directory), host)


def _make(directory: Path, host: str) -> TemporaryCa:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    # Clients of Python 3.13 and later check certificates strictly: those of RFC 5280 name the authority's key and use.
    identity = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    of_authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identity)
    root = (
        _builder("trtmesh throw-away authority", authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_certificates(), critical=True)
        .add_extension(identity, critical=False)
    )
    leaf = (
        _builder("trtmesh", own)
        .add_extension(_names(host), critical=False)
        .add_extension(of_authority, critical=False)
    )
    files = TemporaryCa(directory / "ca.pem", directory / "own.pem", directory / "own.key")
    pem = serialization.Encoding.PEM
    for file, made in ((files.ca, root), (files.certificate, leaf)):
        file.write_bytes(made.sign(authority, hashes.SHA256()).public_bytes(pem))
    key = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with os.fdopen(os.open(files.key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stored:
        stored.write(key)
    return files


def _signs_certificates() -> x509.KeyUsage:
    from cryptography import x509

    others = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment"]
    others += ["key_agreement", "encipher_only", "decipher_only"]
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **dict.fromkeys(others, False))


def _builder(name: str, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named("trtmesh throw-away authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of clients may be late.
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + VALID)
    )


def _names(host: str) -> x509.SubjectAlternativeName:
    from cryptography import x509

    names = dict.fromkeys((*LOCAL_NAMES, socket.gethostname()))
    addresses = dict.fromkeys(LOCAL_ADDRESSES)
    try:
        addresses[str(ipaddress.ip_address(host.strip("[]")))] = None
    except ValueError:
        names[host] = None
    return x509.SubjectAlternativeName(
        [
            *map(x509.DNSName, names),
            *(x509.IPAddress(ipaddress.ip_address(each)) for each in addresses),
        ]
    )
