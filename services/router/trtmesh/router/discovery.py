"""Where replicas come from: host:port entries, each of which may resolve to several addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from trtmesh.chassis.errors import SettingsError

log = logging.getLogger(__name__)

FORGET_AFTER_FAILED_RESOLUTIONS = 15
"""A name that stops resolving keeps its replicas this many rounds: a hiccup of DNS must not end streams."""


def check_addresses(field: str, entries: Sequence[str]) -> None:
    """Raises SettingsError for an entry that is not host:port."""
    for entry in entries:
        host, _, port = entry.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise SettingsError(f"{field} has the entry {entry!r}, which is not host:port")


class Discovery:
    """Keeps a set of addresses current and tells of every one that comes or goes."""

    def __init__(
        self,
        entries: Sequence[str],
        interval_seconds: float,
        on_join: Callable[[str], None],
        on_leave: Callable[[str], None],
    ) -> None:
        self._entries = entries
        self._interval = interval_seconds
        self._on_join = on_join
        self._on_leave = on_leave
        self._by_entry: dict[str, frozenset[str]] = {}
        self._failures: dict[str, int] = {}

    @property
    def addresses(self) -> frozenset[str]:
        """All addresses known now."""
        return frozenset().union(*self._by_entry.values())

    async def follow(self) -> None:
        """Resolves for ever."""
        while True:
            await self.resolve()
            await asyncio.sleep(self._interval)

    async def resolve(self) -> None:
        """Resolves every entry once and tells what changed."""
        before = self.addresses
        for entry in self._entries:
            await self._resolve_entry(entry)
        after = self.addresses
        for address in sorted(after - before):
            self._on_join(address)
        for address in sorted(before - after):
            self._on_leave(address)

    async def _resolve_entry(self, entry: str) -> None:
        host, _, port = entry.rpartition(":")
        with suppress(ValueError):
            ipaddress.ip_address(host.strip("[]"))
            self._by_entry[entry] = frozenset((entry,))
            return
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            self._note_failure(entry, error)
            return
        self._failures.pop(entry, None)
        # One family only: a host with an IPv4 and an IPv6 address is one replica, not two.
        family = min(family for family, *_ in found)
        self._by_entry[entry] = frozenset(
            _join(address[0], int(address[1])) for kind, *_, address in found if kind == family
        )

    def _note_failure(self, entry: str, error: Exception) -> None:
        failures = self._failures[entry] = self._failures.get(entry, 0) + 1
        if failures == 1:
            log.warning("cannot resolve %s: %s", entry, error)
        if failures >= FORGET_AFTER_FAILED_RESOLUTIONS:
            self._by_entry.pop(entry, None)


def _join(host: object, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
