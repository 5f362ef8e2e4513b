"""PEM files and the contexts made from them; an error names the setting and the file, and never shows a key."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from trtmesh.chassis.errors import SettingsError

TLS_1_2_SUITES = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Forward secrecy and authenticated encryption; every suite of TLS 1.3 has both."""

_CERTIFICATE, _KEY, _ENCRYPTED = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----", b"ENCRYPTED"
_CERTIFICATES = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

_VERSION, _UTC_TIME = 0xA0, 0x17
"""Tags of DER."""
_LONGEST_SHORT = 0x7F
"""Bytes of content, up to which one byte tells the length."""


@dataclass(frozen=True, slots=True)
class PemFile:
    """A file, and the setting or option for the file."""

    path: Path
    setting: str

    def read(self) -> bytes:
        """Raises SettingsError."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            self.refuse(error.strerror or str(error))

    def certificates(self) -> bytes:
        """A file of certificates. Raises SettingsError."""
        data = self.read()
        if _CERTIFICATE not in data:
            self.refuse("it has no certificate in PEM")
        return data

    def key(self) -> bytes:
        """A file of a private key. Raises SettingsError."""
        data = self.read()
        if _KEY not in data:
            self.refuse("it has no private key in PEM")
        if _ENCRYPTED in data:
            self.refuse(
                "its key has a passphrase; store it without one, readable by this user alone"
            )
        return data

    def refuse(self, why: str) -> NoReturn:
        raise SettingsError(f"is {self.path}, which cannot be used: {why}", setting=self.setting)


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """A certificate with the chain, and the key."""

    certificate: PemFile
    key: PemFile

    def load_into(self, context: ssl.SSLContext) -> None:
        """Raises SettingsError."""
        self.certificate.certificates()
        self.key.key()
        try:
            context.load_cert_chain(self.certificate.path, self.key.path, password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                self.key.refuse(f"it is not the key of the certificate in {self.certificate.path}")
            self.certificate.refuse(reason_of_tls(error))
        except OSError as error:
            self.certificate.refuse(error.strerror or str(error))


def server_context(
    own: OwnCertificate, client_ca: PemFile | None, protocols: Sequence[str], *, required: bool
) -> ssl.SSLContext:
    """Returns the context of a port for `protocols` (ALPN). Raises SettingsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _strengthen(context, *protocols)
    # A resumed session skips the check of the client's certificate. TLS 1.2 still resumes by session id, which Python
    # cannot turn off: the listener looks at the dates again.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    own.load_into(context)
    if client_ca is not None:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def first_end(pem: bytes) -> float:
    """Returns the Unix time at which the first of the certificates ends. OpenSSL must have read them before."""
    return min(map(_end, _CERTIFICATES.findall(pem.decode("ascii", "replace"))))


def _end(pem: str) -> float:
    """Reads notAfter of RFC 5280, which Python shows of the certificates of peers alone."""
    ((_, certificate),) = _elements(ssl.PEM_cert_to_DER_cert(pem))
    (_, signed), *_ = _elements(certificate)
    fields = _elements(signed)
    has_version = fields[0][0] == _VERSION
    # After the serial number, the algorithm and the issuer.
    _, validity = fields[3 + has_version]
    _, (tag, text) = _elements(validity)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), form).replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """The elements in a value of DER: tag and content."""
    found, at = [], 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size > _LONGEST_SHORT:
            begin, at = at, at + (size & _LONGEST_SHORT)
            size = int.from_bytes(der[begin:at])
        found.append((tag, der[at : at + size]))
        at += size
    return found


def client_context(
    own: OwnCertificate | None, ca: PemFile | None, protocols: Sequence[str]
) -> ssl.SSLContext:
    """Returns the context of connections to servers trusted by `ca`, or else by the system. Raises SettingsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _strengthen(context, *protocols)
    if ca is not None:
        _trust(context, ca)
    else:
        context.load_default_certs()
    if own is not None:
        own.load_into(context)
    return context


def _strengthen(context: ssl.SSLContext, *protocols: str) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(TLS_1_2_SUITES)
    context.set_alpn_protocols(protocols)
    context.options |= ssl.OP_NO_RENEGOTIATION


def _trust(context: ssl.SSLContext, ca: PemFile) -> None:
    text = ca.certificates().decode("ascii", "replace")
    try:
        context.load_verify_locations(cadata=text)
    except ssl.SSLError as error:
        ca.refuse(reason_of_tls(error))


def reason_of_tls(error: ssl.SSLError) -> str:
    """Returns the cause in words: OpenSSL's text names a source line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not count: {error.verify_message}"
    return (error.reason or str(error)).replace("_", " ").lower()
