"""Settings of the admin address."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator
from trtmesh.chassis.settings import Port, Settings, split_commas


class AdminSettings(Settings):
    """Address for admins."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8003
    """Port to listen on."""
    allow_link_local: bool = False
    """Whether admins may add workers at link-local addresses and at those of cloud metadata."""
    token_file: Path | None = None
    """File with the token required of calls; if unset, the variable TRTMESH_ADMIN_TOKEN; if neither, no token."""
    console: Literal["open", "token", "none"] = "open"
    """Who may look at the console at `/console` of this address: all who reach it, or admins with the token. Changes
    and the playground need the token either way, if there is one; `token` without one is refused at the start. `none`
    serves no console."""
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = ()
    """Origins, such as `https://mesh.example`, under which browsers may open the console, besides IP addresses and
    `localhost`; `*` allows all."""
