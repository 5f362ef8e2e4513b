"""Options of commands that connect to a router over TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.tls.client import CA, CERTIFICATE, KEY, SERVER_NAME, TLS, ClientTls

CONNECTION = "Connection"
"""Title under which a command's help has the options of its connection."""

TlsOption = Annotated[
    bool,
    typer.Option(
        "--tls",
        envvar=TLS,
        help="Connect over TLS; the other TLS options imply it.",
        rich_help_panel=CONNECTION,
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        envvar=CA,
        help="PEM file to check the router by; unset, the system's.",
        rich_help_panel=CONNECTION,
    ),
]
CertOption = Annotated[
    Path | None,
    typer.Option(
        envvar=CERTIFICATE,
        help="PEM file with the client's certificate.",
        rich_help_panel=CONNECTION,
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--cert-key",
        envvar=KEY,
        help="PEM file with its private key; unset, that of --cert.",
        rich_help_panel=CONNECTION,
    ),
]
ServerNameOption = Annotated[
    str,
    typer.Option(
        envvar=SERVER_NAME,
        help="Name in the router's certificate; unset, its host.",
        rich_help_panel=CONNECTION,
    ),
]


def tls_of(
    *, tls: bool, ca: Path | None, cert: Path | None, key: Path | None, server_name: str
) -> ClientTls | None:
    """TLS as the options ask for it; None for plain text."""
    if not (tls or ca or cert or key or server_name):
        return None
    return ClientTls(ca, cert, key, server_name, ("--ca", "--cert", "--cert-key"))
