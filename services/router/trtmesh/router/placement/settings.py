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
    kv_index_blocks: Annotated[int, Field(ge=0, le=100_000_000)] = 1_000_000
    """Most remembered KV blocks of workers, about 250 bytes each; the least recently used are evicted."""


class HandoffSettings(Settings):
    """Handoffs of KV between workers."""

    enabled: Literal["auto", "always", "never"] = "auto"
    """Prefill and decode on two workers: `auto` where that is predicted faster, `always` wherever both roles have a
    worker, or `never`."""
