"""How many examples a search of Hypothesis tries."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int, *, soak: int) -> int:
    """The number of every run, or that of `make soak`, whose profile pytest loads before it imports a test."""
    return soak if settings.get_current_profile_name() == "default" else number
