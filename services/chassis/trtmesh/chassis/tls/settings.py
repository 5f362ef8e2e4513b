"""Settings of TLS, the same for every service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from trtmesh.chassis.connection_settings import ConnectionSettings
from trtmesh.chassis.settings import CommaList, ServiceSettings, Settings


class TlsSettings(Settings):
    """TLS 1.2 and 1.3 on all ports of the process, and on its connections to other processes. Changed files are read
    again; they count for new connections."""

    certificate: Path | None = None
    """PEM file with the certificate of the process, followed by intermediate ones; unset, ports speak plain text."""
    key: Path | None = None
    """PEM file with the private key, without a passphrase; unset means that `certificate` holds it."""
    client_ca: Path | None = None
    """PEM file with the authorities of clients' certificates; unset, clients are asked for none."""
    client_certificates: Literal["optional", "required"] = "required"
    """Whether a client without a certificate of `client_ca` is admitted; a certificate of others never is."""
    client_names: CommaList = ()
    """Names of which a client's certificate must have one; unset admits every certificate of `client_ca`."""
    ca: Path | None = None
    """PEM file with the authorities of other processes' certificates. Set, connections to them use TLS and show
    `certificate`; unset, they are plain text."""
    peer_name: str = ""
    """Name in the certificates of other processes; unset means the host of the address."""


class SecuredSettings(ServiceSettings):
    """Settings of a service process with TLS, and with limits of connections."""

    tls: TlsSettings = TlsSettings()
    connections: ConnectionSettings = ConnectionSettings()
