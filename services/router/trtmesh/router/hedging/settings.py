"""Settings of hedging."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import Settings


class HedgeSettings(Settings):
    """Second copies of late sequences, on another worker that gives equal tokens."""

    enabled: bool = False
    """Whether a sequence whose next token is late goes on at two workers, until one of them is ahead."""
    token_share: Annotated[float, Field(gt=0, le=0.5)] = 0.02
    """Most tokens computed twice, as a share of the tokens delivered; those of prompts count by the time they take."""
