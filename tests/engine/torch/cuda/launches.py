"""Records which methods are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def recorded(owner: object, names: tuple[str, ...]) -> list[str]:
    """The names of the methods that are called from now on."""
    calls: list[str] = []

    def wrapped(name: str) -> Callable[..., Any]:
        method = getattr(owner, name)

        def call(*given: Any) -> Any:
            calls.append(name)
            return method(*given)

        return call

    for name in names:
        setattr(owner, name, wrapped(name))
    return calls
