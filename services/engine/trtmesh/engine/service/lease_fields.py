"""Checks the fields of commands about leases."""

from __future__ import annotations

import re

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig

_LEASE_ID = re.compile(r"[0-9a-f]{32}")


def check_lease_id(field: str, value: str) -> None:
    """Raises InvalidField for anything but 128 bits in hexadecimal digits."""
    if not _LEASE_ID.fullmatch(value):
        raise InvalidField.of(field, value, "32 digits of 0 to 9 and a to f")


def lease_seconds(field: str, milliseconds: int, most: int) -> float:
    """The life of a lease. Raises InvalidField for more than `most` milliseconds, or none."""
    if not 0 < milliseconds <= most:
        limit = f"above 0 and at most {most}"
        raise InvalidField.of(field, milliseconds, limit, "max_lease_ms")
    return milliseconds / 1000


def adapter_of(config: GenerationConfig) -> Adapter | None:
    """The adapter of an item, by id and version."""
    lora = config.lora
    if lora is None or lora.id is None:
        return None
    return Adapter(lora.id, version=lora.version or "")
