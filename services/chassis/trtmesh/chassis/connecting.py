"""Explains why a channel has no connection, from the last error of gRPC's core."""

from __future__ import annotations

import re

from trtmesh.chassis.addresses import Address, why_not_address
from trtmesh.chassis.errors import SettingsError, Unavailable, Unsupported


class WrongConnection(Unavailable):
    """Something answers at the address, but rejects this client's way of connecting."""


class WrongService(Unsupported):
    """The server at the address lacks the call: another service, or another release."""


ABSENT = (
    (r"Connection refused", "nothing listens there"),
    (r"errors resolving|DNS resolution failed", "its host name cannot be resolved"),
    (r"unreachable|No route to host", "its network cannot be reached"),
    (
        r"SETTINGS frame$|Endpoint closing|timed out|Timeout|deadline",
        "it does not answer: it is frozen, cut off, or serves no gRPC",
    ),
    (
        r"Connection reset|Socket closed|Broken pipe|recvmsg",
        "it closes connections of this kind: it speaks TLS, wants a certificate, or is ending",
    ),
)
"""gRPC's errors for an address without a server, with their meaning."""

WRONG = (
    (r"WRONG_VERSION_NUMBER", "it speaks plain text: connect without TLS"),
    (
        r"(?:CERTIFICATE_VERIFY_FAILED|BAD_SIGNATURE)(?:: (?P<why>[^:]+))?",
        "its certificate is not trusted ({why}): name the authority that signed it",
    ),
    (
        r"Hostname Verification|not in peer certificate",
        "its certificate has another name: connect by a name that it has, or give that as the server's name",
    ),
    (r"OPENSSL_internal:(?P<why>\w+)", "it ends the TLS handshake ({why}): give what it asks for"),
    (r"ALPN|http1\.x|Failed parsing HTTP/2", "it serves no gRPC: name a port for gRPC"),
)
"""gRPC's errors for an unsuitable server, with their meaning."""


def check_address(address: str, setting: str = "address") -> None:
    """Raises SettingsError unless the address is host:port."""
    try:
        Address.parse(address)
    except ValueError as error:
        raise SettingsError(
            f"is {address!r} but must be host:port: {why_not_address(address)}", setting=setting
        ) from error


def service_error(address: str, details: str) -> WrongService | None:
    """Returns the error for a call unknown to the server, or None for a refused call."""
    if not re.match(r"(?i)method not (found|implemented)|unknown (service|method)", details):
        return None
    return WrongService(
        f"{address}: it does not serve this call: it is another port, or of another release"
    )


def connection_error(address: str, details: str) -> Unavailable | None:
    """Returns the error for a call without a connection, or None for any other failure."""
    if not re.search(r"failed to connect|errors resolving|DNS resolution failed", details):
        return None
    for kind, table in ((WrongConnection, WRONG), (Unavailable, ABSENT)):
        for pattern, problem in table:
            if found := re.search(pattern, details):
                why = found.groupdict().get("why") or "no reason given"
                return kind(f"{address}: {problem.format(why=why)}")
    return Unavailable(f"{address}: it cannot be reached: {details.rpartition('last error: ')[2]}")
