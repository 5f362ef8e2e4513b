"""Settings of the choice of a worker."""

from __future__ import annotations

from typing import Annotated

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
