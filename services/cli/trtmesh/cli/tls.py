"""Options for connecting to a router over TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtmesh.chassis.tls.client import CA, CERTIFICATE, KEY, SERVER_NAME, TLS, ClientTls
from trtmesh.cli.option_groups import option

CONNECTION = "Connection"
"""Help title of the options of a connection."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    tls: bool = option(
        "Connect over TLS; the other TLS options imply it.",
        "--tls",
        default=False,
        envvar=TLS,
        panel=CONNECTION,
    )
    ca: Path | None = option(
        "PEM file to check the router by; unset, the system's.", envvar=CA, panel=CONNECTION
    )
    cert: Path | None = option(
        "PEM file with the client's certificate.", envvar=CERTIFICATE, panel=CONNECTION
    )
    key: Path | None = option(
        "PEM file with its private key; unset, that of --cert.",
        "--cert-key",
        envvar=KEY,
        panel=CONNECTION,
    )
    server_name: str = option(
        "Name in the router's certificate; unset, its host.",
        default="",
        envvar=SERVER_NAME,
        panel=CONNECTION,
    )

    def client_tls(self) -> ClientTls | None:
        """Returns the settings of TLS, or None for plain text."""
        if not (self.tls or self.ca or self.cert or self.key or self.server_name):
            return None
        settings = ("--ca", "--cert", "--cert-key")
        return ClientTls(self.ca, self.cert, self.key, self.server_name, settings)
