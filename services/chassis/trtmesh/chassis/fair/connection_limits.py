"""Limits the open connections of a server, in all and of one address."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, ip_address
from typing import Protocol

NETWORK_BITS = 64
"""Leading bits of an IPv6 address that name one customer: the rest is theirs to choose."""


class ConnectionLimits(Protocol):
    """How many connections a server takes."""

    @property
    def max_open(self) -> int:
        """Most open connections."""

    @property
    def max_per_address(self) -> int:
        """Most open connections of one IPv4 address or one network of IPv6."""


class ConnectionCounts:
    """The open connections of a server, by address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()

    def admit(self, host: str) -> str:
        """Counts a connection until `leave`. Returns '', or why it may not stay; then it does not count."""
        limits, origin = self._limits, origin_of(host)
        if self._open.total() >= limits.max_open:
            return f"the server has {limits.max_open} connections, its limit"
        if self._open[origin] >= limits.max_per_address:
            return f"{origin} has {limits.max_per_address} connections, the limit of an address"
        self._open[origin] += 1
        return ""

    def leave(self, host: str) -> None:
        """Forgets an admitted connection."""
        origin = origin_of(host)
        self._open[origin] -= 1
        if not self._open[origin]:
            del self._open[origin]


def origin_of(host: str) -> str:
    """Returns the owner of a limit: an IPv4 address, or the network of an IPv6 address."""
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
