"""Settings of the choice of workers."""

from __future__ import annotations

from typing import Annotated, Literal

from trtmesh.chassis.settings import OneOf, Settings
from trtmesh.router.placement.policies import POLICIES

PolicyName = Annotated[str, OneOf(tuple(POLICIES))]


class PlacementSettings(Settings):
    """Choice of a worker for an item."""

    policy: PolicyName = "auto"
    """Policy that scores the workers."""


class HandoffSettings(Settings):
    """Handoffs of KV between workers."""

    enabled: Literal["auto", "always", "never"] = "auto"
    """Prefill and decode on two workers: `auto` where that is predicted faster, `always` wherever both roles have a
    worker, or `never`."""
