"""Addresses that no worker has, but that an admin could be tricked into naming: link-local ones, and those at which
clouds serve the credentials of a machine."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from trtmesh.chassis.addresses import Address
from trtmesh.chassis.errors import InvalidField

REFUSED_NETWORKS = tuple(
    map(
        ip_network,
        (
            *("169.254.0.0/16", "fe80::/10"),
            *("fd00:ec2::254/128", "fd20:ce::254/128", "100.100.100.200/32", "192.0.0.192/32"),
        ),
    )
)
"""Link-local networks; AWS, Google Cloud, Alibaba Cloud and Oracle Cloud beyond them."""

LOOKUP_SECONDS = 5.0


async def refuse_link_local(address: Address) -> None:
    """Raises InvalidField for a host that is, or resolves to, an address of REFUSED_NETWORKS.

    A name that does not resolve passes: it has no address to reach.
    """
    for found in await _addresses_of(address):
        if any(found in network for network in REFUSED_NETWORKS):
            raise InvalidField(
                f"is {str(address)!r}, at {found}: link-local and metadata addresses are refused unless"
                " router.admin.allow_link_local is set",
                field="address",
                value=repr(str(address)),
                limit="no link-local or metadata address",
            )


async def _addresses_of(address: Address) -> list[IPv4Address | IPv6Address]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return []
    return [_plain(str(sockaddr[0])) for *_, sockaddr in found]


def _plain(text: str) -> IPv4Address | IPv6Address:
    """The address without a zone; IPv4 within IPv6 as IPv4."""
    found = ip_address(text.partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
