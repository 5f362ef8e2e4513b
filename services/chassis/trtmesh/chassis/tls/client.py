"""TLS of a client: trusted authorities, and the client's certificate."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.tls.pem import OwnCertificate, PemFile, client_context

TLS, CA, CERTIFICATE, KEY, SERVER_NAME = (
    "TRTMESH_TLS",
    *("TRTMESH_TLS_CA", "TRTMESH_TLS_CERTIFICATE", "TRTMESH_TLS_KEY", "TRTMESH_TLS_SERVER_NAME"),
)
"""Variables for connecting commands. Each of them turns TLS on."""

H2 = "h2"
"""ALPN's name of HTTP/2."""


class PeerTls(NamedTuple):
    """TLS of connections to other processes."""

    context: ssl.SSLContext
    name: str
    """Name in their certificates; '' means the host of the address."""


TlsOfPeers = Callable[[], PeerTls | None]
"""The TLS for a new connection to another process; None for plain text."""


def plain_text() -> None:
    """No TLS."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS of a client, from PEM files. `settings` are the names of the first three for errors."""

    ca: Path | None = None
    """Authorities of servers' certificates; None means the system's authorities."""
    certificate: Path | None = None
    """The client's certificate, followed by intermediate certificates."""
    key: Path | None = None
    """The private key; None means in `certificate`."""
    server_name: str = ""
    """Name in the server's certificate; '' means the host of the address."""
    settings: tuple[str, str, str] = ("ca", "certificate", "key")

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> ClientTls | None:
        """Returns the TLS asked for by the variables, or None for plain text."""
        if not any(environ.get(name) for name in (TLS, CA, CERTIFICATE, KEY, SERVER_NAME)):
            return None

        def file(name: str) -> Path | None:
            return Path(environ[name]) if environ.get(name) else None

        names = (CA, CERTIFICATE, KEY)
        return cls(
            file(CA), file(CERTIFICATE), file(KEY), environ.get(SERVER_NAME, ""), settings=names
        )

    def credentials(self) -> grpc.ChannelCredentials:
        """For channels of grpc.aio. Raises SettingsError."""
        own, ca = self._own(), self._ca()
        # grpc.aio reports a wrong file only as a failed connection.
        client_context(own, ca, (H2,))
        return grpc.ssl_channel_credentials(
            ca.read() if ca else None,
            own.key.read() if own else None,
            own.certificate.read() if own else None,
        )

    def channel_options(self) -> list[tuple[str, str]]:
        """Options of a channel with these credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def context(self, protocols: Sequence[str] = (H2,)) -> ssl.SSLContext:
        """Returns the context for these protocols of ALPN. Raises SettingsError."""
        return client_context(self._own(), self._ca(), protocols)

    def peer_tls(self) -> PeerTls:
        """For the mesh's own client. Raises SettingsError."""
        return PeerTls(self.context(), self.server_name)

    def _ca(self) -> PemFile | None:
        return PemFile(self.ca, self.settings[0]) if self.ca else None

    def _own(self) -> OwnCertificate | None:
        if self.certificate is None:
            if self.key is not None:
                raise SettingsError(
                    f"needs {self.settings[1]}, its certificate", setting=self.settings[2]
                )
            return None
        certificate = PemFile(self.certificate, self.settings[1])
        key = PemFile(self.key, self.settings[2]) if self.key else certificate
        return OwnCertificate(certificate, key)
