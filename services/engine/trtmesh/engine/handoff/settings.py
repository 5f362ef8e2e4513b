"""Settings of handoffs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from trtmesh.chassis.settings import Settings, split_commas

TransportName = Literal["shared_memory", "nixl", "grpc"]


class HandoffSettings(Settings):
    """KV that moves between workers."""

    transports: Annotated[
        tuple[TransportName, ...], BeforeValidator(split_commas), Field(min_length=1)
    ] = ("shared_memory", "nixl", "grpc")
    """Transports, the preferred first. Of the default, those that the system lacks are left out."""
    checksums: Literal["none", "grpc", "all"] = "grpc"
    """KV that a sender protects by CRC-32: none, the KV in gRPC messages, or all. KV that another transport reads is
    checked where the blocks of both workers have one size."""


@dataclass(frozen=True, slots=True)
class HandoffLimits:
    """Bounds that no operator has to choose."""

    max_lease_seconds: float = 600.0
    """Longest life of a lease that is not renewed; routers ask for no longer one."""
    max_leases: int = 8192
    """Most leases of each side."""
    max_leases_per_stream: int = 4096
    """Most leases of each side that one router may hold."""
    max_quarantined_fraction: float = 0.25
    """Fraction of the pool; with more blocks in quarantine, the worker refuses reservations."""
    dial_seconds: float = 2.0
    """Time to connect to a sender."""


HANDOFF_LIMITS = HandoffLimits()
