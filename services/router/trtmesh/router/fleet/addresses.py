"""Where settings say that replicas are: entries that are host:port, or name a file of such."""

from __future__ import annotations

from collections.abc import Iterable

from trtmesh.chassis.addresses import Address
from trtmesh.chassis.errors import SettingsError

FILE = "file:"
"""Begins an entry of the settings that names a file of addresses, one a line, which is read again and again."""


def check_entries(field: str, entries: Iterable[str]) -> None:
    """Raises SettingsError for an entry that is neither host:port nor file:PATH."""
    for entry in entries:
        if entry.startswith(FILE) and len(entry) > len(FILE):
            continue
        try:
            Address.parse(entry)
        except ValueError as error:
            raise SettingsError(
                f"{field} has the entry {entry!r}, which is neither host:port nor file:PATH"
            ) from error
