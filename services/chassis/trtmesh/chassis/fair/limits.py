"""Limits of the memory for all clients together, of the rates of a peer, and of the connections of an address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import Protocol


class Budget:
    """The bytes or calls held for all connections of a server, or for all clients of a router.

    Nobody waits for room, because a peer with an endless message would keep the others waiting. Instead, beyond the
    limit, the connection with the most must shed some.
    """

    def __init__(self, limit: int, on_much: Callable[[], None] | None = None) -> None:
        """Calls `on_much` after each addition beyond a quarter of the limit."""
        self.limit = limit
        self._on_much = on_much
        self._accounts: set[Account] = set()
        self.held = 0

    def account(self, shed: Callable[[], None]) -> Account:
        """Opens the account of a connection or client. After `shed`, the owner must hold less."""
        account = Account(self, shed)
        self._accounts.add(account)
        return account

    def forget(self, account: Account) -> None:
        self.held -= account.held
        self._accounts.discard(account)

    def check(self) -> None:
        """Beyond the limit, has the largest account shed. Called for additions beyond a quarter of the limit."""
        if self.held > self.limit:
            max(self._accounts, key=lambda account: account.held).shed()
        if self._on_much is not None:
            self._on_much()


class Account:
    """The bytes or calls held for a connection or client."""

    def __init__(self, budget: Budget, shed: Callable[[], None]) -> None:
        self._budget = budget
        self._closed = False
        self.shed = shed
        self.held = 0

    def add(self, size: int) -> None:
        """Counts an addition, or a release if `size` is negative."""
        if self._closed:
            return
        budget = self._budget
        self.held += size
        budget.held += size
        if size > 0 and 4 * budget.held > budget.limit:
            budget.check()

    def close(self) -> None:
        """Stops counting: the connection or client is lost, and the calls free their memory."""
        if not self._closed:
            self._closed = True
            self._budget.forget(self)
            # A cycle: the method belongs to the owner of this account.
            self.shed = _nothing_to_give


def _nothing_to_give() -> None:
    """The owner is lost."""


@dataclass(frozen=True, slots=True, eq=False)
class Rate:
    """A limit: `burst` at once, then `per_second`."""

    what: str
    burst: int
    per_second: float
    per_served: int = 0
    """Allowance for each served call. A gateway sends the calls of many clients over a single connection, and some
    clients always leave or make mistakes."""
    per_opened: int = 0
    """Allowance for each call, served or not."""


@dataclass(slots=True)
class _Level:
    """The level of a leaky bucket at a time, with the numbers of calls served and opened until then."""

    level: float
    at: float
    served: int
    opened: int


class RateCounts:
    """Counts the recent actions of a peer."""

    def __init__(self) -> None:
        self._levels: dict[Rate, _Level] = {}
        self._served = self._opened = 0

    def note_opened(self) -> None:
        """Notes a call opened on the connection, by either side."""
        self._opened += 1

    def note_served(self) -> None:
        """Notes a response to a call of the peer."""
        self._served += 1

    def exceeds(self, rate: Rate) -> bool:
        """Counts an action. Returns whether the limit is exceeded."""
        now = monotonic()
        last = self._levels.get(rate)
        level = 1.0
        if last is not None:
            paid = (now - last.at) * rate.per_second
            paid += (self._served - last.served) * rate.per_served
            paid += (self._opened - last.opened) * rate.per_opened
            level += max(0.0, last.level - paid)
        self._levels[rate] = _Level(level, now, self._served, self._opened)
        return level > rate.burst


NETWORK_BITS = 64
"""Leading bits of an IPv6 address, given to a customer. The customer chooses the rest."""


class ConnectionLimits(Protocol):
    @property
    def max_open(self) -> int:
        """Most open connections."""

    @property
    def max_per_address(self) -> int:
        """Most open connections of an IPv4 address or an IPv6 network."""


class ConnectionCounts:
    """The open connections of a server, by address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()

    def admit(self, host: str) -> str:
        """Counts a connection until `leave`. Returns '', or why the connection is refused; then nothing is counted."""
        limits, origin = self._limits, origin_of(host)
        if self._open.total() >= limits.max_open:
            return f"the server has {limits.max_open} connections, its limit"
        if self._open[origin] >= limits.max_per_address:
            return f"{origin} has {limits.max_per_address} connections, the limit of an address"
        self._open[origin] += 1
        return ""

    def is_full_for(self, host: str) -> bool:
        """Whether the address has as many connections as one may have."""
        return self._open[origin_of(host)] >= self._limits.max_per_address

    def leave(self, host: str) -> None:
        """Stops counting an admitted connection."""
        origin = origin_of(host)
        self._open[origin] -= 1
        if not self._open[origin]:
            del self._open[origin]


@lru_cache(1024)
def origin_of(host: str) -> str:
    """Returns the owner of a limit: an IPv4 address, or the network of an IPv6 address. Every request asks."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    shift = 128 - NETWORK_BITS
    return f"{IPv6Address(int(address) >> shift << shift)}/{NETWORK_BITS}"
