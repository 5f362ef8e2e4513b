"""The limits of a caller."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import Settings


class RateLimit(Settings):
    """Limits of each caller, at this router. The line of an API key may have its own."""

    tokens_per_second: Annotated[float, Field(gt=0)] | None = None
    """Rate of filling a bucket, in tokens; the bucket pays for prompt and generated tokens. Unset limits nothing."""
    burst_tokens: Annotated[int, Field(ge=1)] = 100_000
    """Size of a bucket of tokens."""
    items_per_second: Annotated[float, Field(gt=0)] | None = None
    """Rate of items, one per prompt of a request or a resumption. Unset limits nothing."""
    burst_items: Annotated[int, Field(ge=1)] = 100
    """Items at once after a pause."""
    max_items: Annotated[int, Field(ge=1)] | None = None
    """Most live items; a request over the limit is refused with RATE_LIMITED, or with INVALID_FIELD if it alone has
    more. Unset limits nothing."""
    max_priority: int | None = None
    """Highest `priority` of a request; may be negative. A higher priority is refused with INVALID_FIELD. Unset limits
    nothing."""
