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
    """Memory for contents of adapters. Without `directory`, adapters that requests brought are forgotten beyond it, the
    longest unused first."""
    directory: Path | None = None
    """Directory for the registry and for contents; routers may share it. Unset keeps both in memory."""
    directory_bytes: Bytes = 2**34
    """Most bytes there of adapters that requests brought; the longest unused are forgotten."""
    roots: CommaList = ()
    """Directories whose subdirectories may be registered as adapters by `source`."""
    follow: str = ""
    """Admin address of another router, host:port, whose registry this one follows."""
    follow_token_file: Path | None = None
    """File with that router's admin token; if unset, the variable TRTMESH_ADMIN_TOKEN; if neither, no token."""
