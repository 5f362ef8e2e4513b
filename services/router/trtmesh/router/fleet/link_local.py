"""Addresses that an admin could be tricked into naming: link-local addresses, and the addresses where clouds serve the
credentials of a machine. No worker has such an address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from trtmesh.chassis import addresses
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

IPV4_NETWORKS = tuple(
    map(ip_network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"))
)
"""IPv6 networks of translators: an address ends with the IPv4 address behind the translator."""

LOOKUP_SECONDS = 5.0


async def refuse_link_local(address: Address) -> None:
    """Raises InvalidField for a host that is, or resolves to, an address of REFUSED_NETWORKS.

    A name without an address passes, since nothing can be reached. The name may have an address later, so
    `check_dialled` looks at each address before dialling.
    """
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            found = await addresses.resolved(address)
    except (OSError, TimeoutError):
        return
    for each in found:
        check_dialled(address, each)


def check_dialled(address: Address, found: str) -> None:
    """Raises InvalidField if the IP address `found` of a worker is in REFUSED_NETWORKS, in whatever form."""
    if any(meant in network for meant in _meant(found) for network in REFUSED_NETWORKS):
        raise InvalidField(
            f"is {str(address)!r}, at {found}: link-local and metadata addresses are refused unless"
            " router.admin.allow_link_local is set",
            field="address",
            value=repr(str(address)),
            limit="no link-local or metadata address",
        )


def _meant(text: str) -> Iterator[IPv4Address | IPv6Address]:
    """Returns the address without a zone, and the IPv4 addresses reached by packets to the address."""
    found = ip_address(text.partition("%")[0])
    yield found
    if not isinstance(found, IPv6Address):
        return
    yield from filter(None, (found.ipv4_mapped, found.sixtofour, *(found.teredo or ())))
    if any(found in network for network in IPV4_NETWORKS):
        yield IPv4Address(int(found) & 0xFFFFFFFF)
