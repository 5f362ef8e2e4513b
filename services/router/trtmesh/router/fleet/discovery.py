"""Finds replicas from host:port entries, resolving names to one or several addresses, and from files."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trtmesh.chassis.addresses import Address
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.foreign_address import ForeignAddress, host_of, parse_engine

log = logging.getLogger(__name__)

FILE = "file:"
"""Prefix of an entry for a file of addresses."""

FORGET_AFTER_FAILED_RESOLUTIONS = 15
"""Rounds before an unresolvable name loses all replicas, so that a DNS failure ends no stream."""

PATIENCE_SECONDS = 1.0
"""Longest wait of a round for a name."""

LARGEST_FILE = 2**20


Parse = Callable[[str], Address | ForeignAddress]
"""Parses an address. Raises ValueError."""


def check_engines(field: str, entries: Iterable[str]) -> None:
    """Raises SettingsError unless every entry is host:port, engine://host:port or file:PATH."""
    _check(field, entries, parse_engine, "host:port, vllm://host:port and its like, nor file:PATH")


def check_entries(field: str, entries: Iterable[str]) -> None:
    """Raises SettingsError unless every entry is host:port or file:PATH."""
    _check(field, entries, Address.parse, "host:port nor file:PATH")


def _check(field: str, entries: Iterable[str], parse: Parse, forms: str) -> None:
    for entry in entries:
        if entry.startswith(FILE) and len(entry) > len(FILE):
            continue
        try:
            parse(entry)
        except ValueError as error:
            raise SettingsError(
                f"has the entry {entry!r}, which is neither {forms}", setting=field
            ) from error


@dataclass(slots=True)
class Discovery:
    """Keeps a set of addresses current and reports each change.

    Joins and leaves of an address alternate. All state of an entry, including the lookup, is dropped with the entry.
    """

    _entries: Sequence[str]
    _interval_seconds: float
    _on_join: Callable[[str], object]
    _on_leave: Callable[[str], object]
    _parse: Parse = Address.parse
    _found: dict[str, frozenset[str]] = field(default_factory=dict)
    """Addresses by entry."""
    _told: set[str] = field(default_factory=set)
    """Addresses reported as joined."""
    _lookups: dict[str, asyncio.Task[frozenset[str]]] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _files: dict[str, list[str]] = field(default_factory=dict)
    _file_problems: dict[str, str] = field(default_factory=dict)

    async def follow(self) -> None:
        """Resolves at the interval until cancelled."""
        try:
            while True:
                await self.resolve()
                await asyncio.sleep(self._interval_seconds)
        finally:
            for lookup in self._lookups.values():
                lookup.cancel()

    async def resolve(self) -> None:
        """Resolves every entry once and reports the changes."""
        entries = frozenset(await self._spelt_out())
        self._forget_all_but(entries)
        await self._look_up(entries)
        self._tell()

    def _forget_all_but(self, entries: frozenset[str]) -> None:
        for entry in self._lookups.keys() - entries:
            self._lookups.pop(entry).cancel()
        for kept in (self._found, self._failures):
            for entry in kept.keys() - entries:
                del kept[entry]

    async def _look_up(self, entries: frozenset[str]) -> None:
        """Looks every entry up. A slow lookup is read in a later round: an unknown name may take DNS many seconds."""
        for entry in entries - self._lookups.keys():
            self._lookups[entry] = asyncio.create_task(_addresses_of(entry, self._parse))
        if self._lookups:
            await asyncio.wait(self._lookups.values(), timeout=PATIENCE_SECONDS)
        for entry, lookup in [*self._lookups.items()]:
            if lookup.done():
                del self._lookups[entry]
                self._take_note(entry, lookup)

    def _take_note(self, entry: str, lookup: asyncio.Task[frozenset[str]]) -> None:
        try:
            self._found[entry] = lookup.result()
        except (OSError, UnicodeError) as error:
            self._note_failure(entry, error)
        else:
            self._failures.pop(entry, None)

    def _note_failure(self, entry: str, error: Exception) -> None:
        failures = self._failures[entry] = self._failures.get(entry, 0) + 1
        if failures == 1:
            log.warning("cannot resolve %s: %s", entry, error)
        if failures >= FORGET_AFTER_FAILED_RESOLUTIONS:
            self._found.pop(entry, None)

    def _tell(self) -> None:
        known = frozenset().union(*self._found.values())
        for address in sorted(known - self._told):
            self._told.add(address)
            self._on_join(address)
        for address in sorted(self._told - known):
            self._told.remove(address)
            self._on_leave(address)

    async def _spelt_out(self) -> list[str]:
        """The entries with files replaced by their addresses. An unreadable file keeps the former addresses."""
        entries: list[str] = []
        for entry in self._entries:
            if entry.startswith(FILE):
                entries += await self._read(entry.removeprefix(FILE))
            else:
                entries.append(entry)
        return entries

    async def _read(self, path: str) -> list[str]:
        try:
            lines = await asyncio.to_thread(_addresses_in, path, self._parse)
        except (OSError, ValueError) as error:
            if self._file_problems.get(path) != str(error):
                log.warning("cannot use %s: %s", path, error)
            self._file_problems[path] = str(error)
        else:
            self._file_problems.pop(path, None)
            self._files[path] = lines
        return self._files.get(path, [])


async def _addresses_of(entry: str, parse: Parse) -> frozenset[str]:
    """Resolves an entry. Raises OSError or UnicodeError."""
    parsed = parse(entry)
    host, port = host_of(parsed)
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return frozenset((entry,))
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A single family, so that a dual-stack host counts once.
    family = min(family for family, *_ in found)
    return frozenset(
        _at(parsed, Address(str(address[0]), int(address[1])))
        for kind, *_, address in found
        if kind == family
    )


def _at(parsed: Address | ForeignAddress, found: Address) -> str:
    """An entry at one of its addresses."""
    return str(parsed._replace(address=found) if isinstance(parsed, ForeignAddress) else found)


def _addresses_in(path: str, parse: Parse) -> list[str]:
    """Reads a file's addresses, skipping comments. Raises OSError, or ValueError for a line that is none."""
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(LARGEST_FILE + 1)
    if len(text) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE} characters")
    stripped = (line.partition("#")[0].strip() for line in text.splitlines())
    lines = [line for line in stripped if line]
    for line in lines:
        parse(line)
    return lines
