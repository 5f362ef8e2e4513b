"""Where replicas come from: host:port entries, each of which may resolve to several addresses, and files of them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trtmesh.chassis.errors import SettingsError

log = logging.getLogger(__name__)

FORGET_AFTER_FAILED_RESOLUTIONS = 15
"""A name that stops resolving keeps its replicas this many rounds: a hiccup of DNS must not end streams."""


PATIENCE_SECONDS = 1.0
"""How long a round waits for a name."""

FILE = "file:"
"""Begins an entry that names a file of entries, one a line, which is read again whenever names are resolved."""

LARGEST_FILE = 2**20


def check_addresses(field: str, entries: Sequence[str]) -> None:
    """Raises SettingsError for an entry that is neither host:port nor file:PATH."""
    for entry in entries:
        if entry.startswith(FILE) and len(entry) > len(FILE):
            continue
        host, _, port = entry.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise SettingsError(
                f"{field} has the entry {entry!r}, which is neither host:port nor file:PATH"
            )


class Discovery:
    """Keeps a set of addresses current and tells of every one that comes or goes."""

    def __init__(
        self,
        entries: Sequence[str],
        interval_seconds: float,
        on_join: Callable[[str], object],
        on_leave: Callable[[str], object],
    ) -> None:
        self._entries = entries
        self._interval = interval_seconds
        self._on_join = on_join
        self._on_leave = on_leave
        self._by_entry: dict[str, frozenset[str]] = {}
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._files: dict[str, list[str]] = {}
        self._file_problems: dict[str, str] = {}

    @property
    def addresses(self) -> frozenset[str]:
        """All addresses known now."""
        return frozenset().union(*self._by_entry.values())

    async def follow(self) -> None:
        """Resolves for ever."""
        try:
            while True:
                await self.resolve()
                await asyncio.sleep(self._interval)
        finally:
            for lookup in self._lookups.values():
                lookup.cancel()

    async def resolve(self) -> None:
        """Resolves every entry once and tells what changed."""
        before = self.addresses
        entries = await self._spelt_out()
        for gone in self._by_entry.keys() - set(entries):
            del self._by_entry[gone]
        await self._look_up(entries)
        after = self.addresses
        for address in sorted(after - before):
            self._on_join(address)
        for address in sorted(before - after):
            self._on_leave(address)

    async def _look_up(self, entries: Sequence[str]) -> None:
        """Looks every entry up. One that takes long is taken note of in a later round and delays no other: a name that
        does not exist may keep a server of names busy for many seconds."""
        for entry in entries:
            if entry not in self._lookups:
                self._lookups[entry] = asyncio.create_task(self._resolve_entry(entry))
        if self._lookups:
            await asyncio.wait(self._lookups.values(), timeout=PATIENCE_SECONDS)
        for entry, lookup in [*self._lookups.items()]:
            if lookup.done():
                del self._lookups[entry]
                lookup.result()

    async def _spelt_out(self) -> list[str]:
        """The entries, with what files say now in their place. What cannot be read says what it said before."""
        entries: list[str] = []
        for entry in self._entries:
            if entry.startswith(FILE):
                entries += await self._read(entry.removeprefix(FILE))
            else:
                entries.append(entry)
        return entries

    async def _read(self, path: str) -> list[str]:
        try:
            lines = await asyncio.to_thread(_lines_of, path)
            check_addresses(path, lines)
        except (OSError, ValueError, SettingsError) as error:
            if self._file_problems.get(path) != str(error):
                log.warning("cannot use %s: %s", path, error)
            self._file_problems[path] = str(error)
        else:
            self._file_problems.pop(path, None)
            self._files[path] = lines
        return self._files.get(path, [])

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


def _lines_of(path: str) -> list[str]:
    """The lines of a file, without comments and blank lines."""
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(LARGEST_FILE + 1)
    if len(text) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE} characters")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _join(host: object, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
