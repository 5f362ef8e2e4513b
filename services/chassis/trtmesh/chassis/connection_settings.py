"""Settings of the connections to a gRPC port."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import Settings


class ConnectionSettings(Settings):
    """Limits of the connections to each port of clients or services. A connection beyond them is closed with a GOAWAY
    that says so. Over HTTP/1.1 it replaces one without a request, or is answered with 503."""

    max_open: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    """Most open connections."""
    max_per_address: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Most open connections of one IPv4 address or one /64 network of IPv6. A proxy is one for all behind it,
    and over HTTP/1.1 needs a connection for each request at a time."""
    max_age_seconds: Annotated[float, Field(ge=0, le=10_000_000)] = 0.0
    """Age at which a connection is sent GOAWAY, give or take a tenth: running calls finish, and new ones use a new
    connection, which a load balancer may send elsewhere; 0 means no limit. For ports of clients alone: a link between
    services is not replaced while its stream runs."""
