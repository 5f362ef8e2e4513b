"""Who calls: the owner of requests, named in logs, metrics and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtmesh.router.callers.limits import RateLimit


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller, equal to any caller of the same name.

    The name is the name of an API key in the file, `certificate:NAME`, `unlisted:DIGEST` of a key missing in the file,
    or `anonymous`. Names in the file have no colon, so no kind passes for another.
    """

    name: str
    limits: RateLimit = field(default=RateLimit(), compare=False, repr=False)
    account: str = field(default="", compare=False, repr=False)
    """Where the limits are counted; '' for an account of the caller's own."""

    def __str__(self) -> str:
        return self.name


ANONYMOUS = "anonymous"
"""The name of all callers without credentials."""
