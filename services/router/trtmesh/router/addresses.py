"""Where replicas are said to be: host:port, in settings, in files and by admins."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv6Address
from typing import NamedTuple

from trtmesh.chassis.errors import SettingsError

FILE = "file:"
"""Begins an entry of the settings that names a file of addresses, one a line, which is read again and again."""

_NAME = re.compile(r"[\w.-]+")
_PORT = re.compile(r"[0-9]{1,5}")


class Address(NamedTuple):
    """A name or an IP address, the latter without brackets, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError for what is not host:port; an IPv6 address is in brackets."""
        host, _, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host, good = host[1:-1], _is_ipv6(host[1:-1])
        else:
            good = _NAME.fullmatch(host) is not None
        if not good or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is not host:port")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True
