"""Finds replicas from host:port entries, resolving names to one or several addresses, and from files."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from trtmesh.chassis.addresses import Address, ForeignAddress, host_of, parse_engine
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.resting_file import RestingFile

log = logging.getLogger(__name__)

FILE = "file:"
"""Prefix of an entry for a file of addresses."""

RESOLVE_SECONDS = 2.0
"""Interval at which host names are resolved and files of addresses read again."""

UNKNOWN_ROUNDS = 15
"""Answers in a row that DNS does not know a name, before the replicas leave. No other failure removes any."""

MISSED_SECONDS = 600.0
"""How long a replica in use may be missing from the answers for the name: name servers answer with some of many
addresses, and repeat an answer from their caches. A replica out of use leaves with the first answer without the
address."""

UNKNOWN = frozenset(
    getattr(socket, name)
    for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")
    if hasattr(socket, name)
)
"""Errors of a lookup for a name without addresses; all others are failures of the lookup itself."""

PATIENCE_SECONDS = 1.0
"""Longest wait of a round for a name."""

LARGEST_FILE = 2**20


Parse = Callable[[str], Address | ForeignAddress]
"""Parses an address. Raises ValueError."""


def check_engines(field: str, entries: Iterable[str]) -> None:
    """Raises SettingsError unless every entry is host:port, engine://host:port or file:PATH."""
    _check(field, entries, parse_engine, "host:port, vllm://host:port or its like, or file:PATH")


def check_entries(field: str, entries: Iterable[str]) -> None:
    """Raises SettingsError unless every entry is host:port or file:PATH."""
    _check(field, entries, Address.parse, "host:port or file:PATH")


def _check(field: str, entries: Iterable[str], parse: Parse, forms: str) -> None:
    for entry in entries:
        if entry.startswith(FILE) and len(entry) > len(FILE):
            continue
        try:
            parse(entry)
        except ValueError as error:
            raise SettingsError(
                f"has an entry that is not {forms}: {error}", setting=field
            ) from error


@dataclass(slots=True)
class Discovery:
    """Keeps a set of addresses current and reports each change.

    Joins and leaves of an address alternate. All state of an entry, including the lookup, is dropped with the entry. A
    replica in use leaves when the name is unknown, or is missing from the answers for long; a failing name server
    removes none.
    """

    _entries: Sequence[str]
    _on_join: Callable[[str], object]
    _on_leave: Callable[[str], object]
    _parse: Parse = Address.parse
    _in_use: Callable[[str], bool] = lambda _: False
    """Whether the replica at an address works."""
    _on_problem: Callable[[str], object] = lambda _: None
    """Told why names or files are not up to date, or ''."""
    _found: dict[str, dict[str, float]] = field(default_factory=dict)
    """The addresses of each entry, with the time since the first answer without the address."""
    _told: set[str] = field(default_factory=set)
    """Addresses reported as joined."""
    _lookups: dict[str, asyncio.Task[frozenset[str]]] = field(default_factory=dict)
    _unknown: dict[str, int] = field(default_factory=dict)
    """Answers in a row that an entry's name is unknown."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why an entry or a file is not up to date."""
    _told_problem: str = ""
    _files: dict[str, list[str]] = field(default_factory=dict)
    _resting: dict[str, RestingFile] = field(default_factory=dict)

    async def follow(self) -> None:
        """Resolves at the interval until cancelled."""
        try:
            while True:
                await self.resolve()
                await asyncio.sleep(RESOLVE_SECONDS)
        finally:
            for lookup in self._lookups.values():
                lookup.cancel()

    async def resolve(self) -> None:
        """Resolves every entry once and reports the changes."""
        entries = frozenset(await self._spelt_out())
        self._forget_all_but(entries)
        await self._look_up(entries)
        self._tell()
        if (problem := "; ".join(self.problems.values())) != self._told_problem:
            self._told_problem = problem
            self._on_problem(problem)

    def _forget_all_but(self, entries: frozenset[str]) -> None:
        for entry in self._lookups.keys() - entries:
            self._lookups.pop(entry).cancel()
        for entry in self._found.keys() - entries:
            del self._found[entry]
        for entry in self._unknown.keys() - entries:
            del self._unknown[entry]
        for entry in self.problems.keys() - entries - self._resting.keys():
            del self.problems[entry]

    async def _look_up(self, entries: frozenset[str]) -> None:
        """Looks every entry up. A slow lookup is read in a later round: an unknown name may take DNS many seconds."""
        for entry in entries - self._lookups.keys():
            self._lookups[entry] = asyncio.create_task(addresses_of(entry, self._parse))
        if self._lookups:
            await asyncio.wait(self._lookups.values(), timeout=PATIENCE_SECONDS)
        for entry, lookup in [*self._lookups.items()]:
            if lookup.done():
                del self._lookups[entry]
                self._take_note(entry, lookup)

    def _take_note(self, entry: str, lookup: asyncio.Task[frozenset[str]]) -> None:
        try:
            addresses = lookup.result()
        except (OSError, UnicodeError) as error:
            self._note_failure(entry, error)
        else:
            self._unknown.pop(entry, None)
            if self.problems.pop(entry, None):
                log.info("DNS answers for %s again", entry)
            now = asyncio.get_running_loop().time()
            self._found[entry] = dict(self._merged(self._found.get(entry, {}), addresses, now))

    def _merged(
        self, known: dict[str, float], answer: frozenset[str], now: float
    ) -> Iterator[tuple[str, float]]:
        """The addresses of an entry after an answer."""
        for address in answer:
            yield address, inf
        for address in known.keys() - answer:
            since = min(now, known[address])
            if self._in_use(address) and now - since < MISSED_SECONDS:
                yield address, since

    def _note_failure(self, entry: str, error: Exception) -> None:
        """An unknown name loses its replicas in the end; any other failure says nothing about them."""
        found, said = len(self._found.get(entry, ())), getattr(error, "strerror", None) or error
        if isinstance(error, UnicodeError) or getattr(error, "errno", None) in UNKNOWN:
            rounds = self._unknown[entry] = self._unknown.get(entry, 0) + 1
            fate = f"its {found} replicas leave after {UNKNOWN_ROUNDS} such answers"
            self._note(entry, f"DNS does not know {entry}: {said}", f"; {fate}" if found else "")
            if rounds >= UNKNOWN_ROUNDS:
                self._found.pop(entry, None)
        else:
            fate = f"; its {found} replicas stay" if found else ""
            self._note(entry, f"DNS gives no answer for {entry}: {said}", fate)

    def _note(self, entry: str, problem: str, fate: str = "") -> None:
        """Notes a problem, and logs it once."""
        if self.problems.get(entry) != problem:
            log.warning("%s%s", problem, fate)
        self.problems[entry] = problem

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
        if (resting := self._resting.get(path)) is None:
            self._resting[path] = await asyncio.to_thread(RestingFile, Path(path))
        elif not await asyncio.to_thread(resting.is_due):
            # Half of a file that is being written would remove replicas.
            return self._files.get(path, [])
        try:
            lines = await asyncio.to_thread(_addresses_in, path, self._parse)
        except (OSError, ValueError) as error:
            self._note(path, f"cannot use {path}: {error}")
        else:
            self.problems.pop(path, None)
            self._files[path] = lines
        return self._files.get(path, [])


async def addresses_of(entry: str, parse: Parse) -> frozenset[str]:
    """Resolves an entry into addresses, each written in the one way. Raises OSError or UnicodeError."""
    parsed = parse(entry)
    host, port = host_of(parsed)
    with suppress(ValueError):
        ip = ipaddress.ip_address(host)
        return frozenset((_at(parsed, Address(str(getattr(ip, "ipv4_mapped", None) or ip), port)),))
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A single family, so that a dual-stack host counts once.
    family = min(family for family, *_ in found)
    return frozenset(
        _at(parsed, Address(str(address[0]), int(address[1])))
        for kind, *_, address in found
        if kind == family
    )


def _at(parsed: Address | ForeignAddress, found: Address) -> str:
    """An entry at an address of the name."""
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
