"""Settings of the choice of workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from trtmesh.chassis.settings import OneOf, Settings
from trtmesh.router.placement.policies import POLICIES

PolicyName = Annotated[str, OneOf(tuple(POLICIES))]


class PlacementSettings(Settings):
    """Choice of a worker for an item."""

    policy: PolicyName = "auto"
    """Policy that scores the workers."""
    explained_decisions: Annotated[int, Field(ge=0, le=1_000_000)] = 4096
    """Latest decisions kept for `trtmesh explain`."""
    kv_index_blocks: Annotated[int, Field(ge=0, le=100_000_000)] = 1_000_000
    """Most KV blocks of workers that are remembered, about 250 bytes each; least recently used ones are evicted."""
    sibling_wait_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Longest wait of an item for a beginning of its prompt that another item of the request computes."""


class HandoffSettings(Settings):
    """Handoffs of KV between workers."""

    enabled: Literal["auto", "always", "never"] = "auto"
    """Prefill and decode on two workers: `auto` where that is predicted faster, `always` wherever both roles have a
    worker, or `never`."""
    lease_seconds: Annotated[float, Field(ge=0.3, le=3600)] = 10.0
    """Life of a lease unless it is renewed; leases are renewed every third of it."""
    prefill_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Time from the reservation to the end of the prefill; afterwards the item migrates."""
    transfer_seconds: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """Time from the end of the prefill to the next token; afterwards the item migrates."""
    client_lease_seconds: Annotated[float, Field(ge=0.3, le=600)] = 60.0
    """Time for a client to bring back the state of a context_only item with generation_only."""
    max_parked: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    """Most KV on workers that waits for a client: of paused sequences, and of context_only items until their second
    half or the end of their lease. Further ones are computed again; 0 keeps none."""
