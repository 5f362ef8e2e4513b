"""Which adapter an item runs with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA by number and content; `version` is the digest that workers report, '' if none has reported one."""

    id: int
    name: str = ""
    version: str = ""
