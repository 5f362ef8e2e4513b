"""Terms of a handoff for both sides: outcomes, valid ids and lives of leases, and errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from trtmesh.chassis.errors import HandoffFailed, InvalidField
from trtmesh.engine.backend import Content

_LEASE_ID = re.compile(r"[0-9a-f]{32}")


class Outcome(Enum):
    """The end of a lease. Every granted lease has a single outcome, or is still held."""

    CONSUMED = "consumed"
    RELEASED = "released"
    EXPIRED = "expired"


class Problem(Enum):
    """Why a handoff failed. The router then migrates the item, and the prompt is computed again."""

    INCOMPATIBLE = "incompatible"
    """The compatibility hash differs, or the element types, or layers or heads are missing."""
    CHECKSUM = "checksum"
    READ_FAILED = "read_failed"
    PEER_LOST = "peer_lost"
    """The fetch ended before the data was complete."""
    WRONG_TOKENS = "wrong_tokens"
    """The KV belongs to other tokens than the submitted tokens."""
    PROTOCOL = "protocol"
    """The peer broke the protocol."""
    EXPIRED = "expired"
    COMPUTE = "compute"
    """The sender could not compute the KV."""


@dataclass(frozen=True, slots=True)
class CommitMark:
    """The sender's statement: all KV of `content` is in parts 0 to `parts` - 1, and final."""

    parts: int
    content: Content


_SENTENCES = {
    Problem.INCOMPATIBLE: "the KV cannot be used here",
    Problem.CHECKSUM: "a part of the KV arrived damaged",
    Problem.READ_FAILED: "a part of the KV could not be read",
    Problem.PEER_LOST: "the transfer ended before the KV was complete",
    Problem.WRONG_TOKENS: "the KV is that of other tokens than the submitted ones",
    Problem.PROTOCOL: "the other worker broke the handoff protocol",
    Problem.EXPIRED: "the lease was not renewed in time",
    Problem.COMPUTE: "the KV could not be computed",
}


def failure(problem: Problem, lease_id: str, detail: str = "") -> HandoffFailed:
    """The error of a handoff; `detail` names the cause."""
    sentence = f"lease {lease_id} failed: {_SENTENCES[problem]}"
    return HandoffFailed(f"{sentence}: {detail}" if detail else sentence)


def unknown(lease_id: str, field: str) -> HandoffFailed:
    """The error for a lease after the end, or never granted."""
    return HandoffFailed(
        "names a lease that is not held here; continue from the tokens", field=field, value=lease_id
    )


def check_lease_id(field: str, value: str) -> None:
    """Raises InvalidField for anything but 128 bits in hexadecimal digits."""
    if not _LEASE_ID.fullmatch(value):
        raise InvalidField.of(field, value, "32 digits of 0 to 9 and a to f")


def lease_seconds(field: str, milliseconds: int, most: int) -> float:
    """The life of a lease. Raises InvalidField for more than `most` milliseconds, or none."""
    if not 0 < milliseconds <= most:
        raise InvalidField.of(field, milliseconds, f"above 0 and at most {most}", "max_lease_ms")
    return milliseconds / 1000
