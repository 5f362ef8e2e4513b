"""Collects the facts of a running mesh: one call to a router, which knows the others, within a bound."""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

from trtmesh.chassis.addresses import Address
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.process_facts import unix_ms
from trtmesh.client import AdminClient, ClientTls
from trtmesh.tools.checkup.certificates import ShownCertificate, shown_in
from trtmesh.v1 import router_admin_pb2 as pb


@dataclass(frozen=True, slots=True)
class MeshFacts:
    """A mesh as seen by one router, and that router as seen from here."""

    router: str
    silence: str = ""
    """Why the router did not answer."""
    seen: pb.ListWorkersResponse = field(default_factory=pb.ListWorkersResponse)
    clock_ahead_ms: int = 0
    """How far the router's clock is ahead of this machine's; 0 if it does not tell."""
    now: float = 0.0
    certificate: ShownCertificate | None = None
    """Of the router; None for plain text."""


async def collect_mesh(client: AdminClient, tls: ClientTls | None, seconds: float) -> MeshFacts:
    """Asks the router. Raises SettingsError for unusable options; everything else is a fact."""
    router, now = f"router {client.address}", time.time()
    try:
        async with asyncio.timeout(seconds):
            asked = unix_ms()
            seen = await client.list_workers()
            middle = (asked + unix_ms()) // 2
            certificate = await _certificate(client.address, tls) if tls else None
    except TimeoutError:
        return MeshFacts(router, f"it did not answer within {seconds:g} s")
    except TrtmeshError as error:
        return MeshFacts(router, str(error))
    ahead = seen.unix_ms - middle if seen.unix_ms else 0
    return MeshFacts(router, "", seen, ahead, now, certificate)


async def _certificate(admin: str, tls: ClientTls) -> ShownCertificate | None:
    """The certificate that the router shows; the call before has checked it."""
    address = Address.parse(admin)
    name = tls.server_name or address.host
    try:
        _, writer = await asyncio.open_connection(*address, ssl=tls.context(), server_hostname=name)
    except OSError:
        return None
    try:
        return shown_in(writer.get_extra_info("peercert") or {})
    finally:
        writer.close()
        with suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address, host:port."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
