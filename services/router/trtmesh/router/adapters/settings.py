"""Settings of the adapters that a router gives to workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import CommaList, Settings

Bytes = Annotated[int, Field(ge=0, le=2**50)]


class AdapterSettings(Settings):
    """The adapters that the router gives to workers."""

    bytes: Bytes = 2**30
    """Memory for contents of adapters. Without `directory`, adapters brought by requests are forgotten beyond this
    limit, the longest unused first."""
    directory: Path | None = None
    """Directory for the registry and for contents; routers may share it. Unset keeps both in memory."""
    directory_bytes: Bytes = 2**34
    """Most bytes in `directory` of adapters brought by requests; the longest unused are forgotten."""
    roots: CommaList = ()
    """Directories whose subdirectories may be registered as adapters by `source`."""
    follow: str = ""
    """Admin address, host:port, of another router. This router then follows the registry there."""
    follow_token_file: Path | None = None
    """File with that router's admin token; if unset, the variable TRTMESH_ADMIN_TOKEN; if neither, no token."""
