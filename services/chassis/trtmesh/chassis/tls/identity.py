"""The identity of a client by certificate."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Any

COMMON_NAME, SUBJECT_ALTERNATIVE_NAME = "x509_common_name", "x509_subject_alternative_name"
"""Keys of names, as gRPC spells them."""


@dataclass(frozen=True, slots=True)
class CertificateNames:
    """Names of a checked certificate."""

    common_name: str
    names: tuple[str, ...]
    """The subject alternative names: DNS names, URIs, mail and IP addresses."""

    @property
    def all_names(self) -> frozenset[str]:
        return frozenset((*self.names, self.common_name)) - {""}

    @property
    def name(self) -> str:
        """The first name, or '' for a certificate without names."""
        return self.common_name or next(iter(self.names), "")

    def __str__(self) -> str:
        return self.name or "a certificate without names"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Returns the identity in the form of grpc.aio."""
        return {
            "transport_security_type": [b"ssl"],
            COMMON_NAME: [self.common_name.encode()] if self.common_name else [],
            SUBJECT_ALTERNATIVE_NAME: [name.encode() for name in self.names],
        }


def identity_of(transport: asyncio.BaseTransport | None) -> CertificateNames | None:
    """The client on the other side; None on a plain port, or for a client without a certificate."""
    # None too once the connection is closed.
    shown: Mapping[str, Any] = (transport and transport.get_extra_info("peercert")) or {}
    if not shown:
        return None
    subject = {key: value for parts in shown.get("subject", ()) for key, value in parts}
    names = tuple(value for _, value in shown.get("subjectAltName", ()))
    return CertificateNames(subject.get("commonName", ""), names)


def has_expired(transport: asyncio.BaseTransport) -> bool:
    """Whether the client's certificate is over: a session that TLS 1.2 resumes checks no certificate again."""
    shown: Mapping[str, Any] = transport.get_extra_info("peercert") or {}
    over = shown.get("notAfter")
    return over is not None and ssl.cert_time_to_seconds(over) < time()
