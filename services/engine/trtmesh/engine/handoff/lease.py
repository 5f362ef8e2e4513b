"""Terms of a handoff that sender and receiver share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtmesh.engine.kv_memory import Content


class Outcome(Enum):
    """How a lease ended. Every granted lease has one outcome, or is still held."""

    CONSUMED = "consumed"
    RELEASED = "released"
    EXPIRED = "expired"


class Problem(Enum):
    """Why a handoff failed. The router then migrates the item, which computes the prompt again."""

    INCOMPATIBLE = "incompatible"
    """The compatibility hash differs, or the element types, or layers or heads are missing."""
    CHECKSUM = "checksum"
    READ_FAILED = "read_failed"
    PEER_LOST = "peer_lost"
    """The fetch ended before the data was complete."""
    WRONG_TOKENS = "wrong_tokens"
    """The KV is that of other tokens than the submitted ones."""
    PROTOCOL = "protocol"
    """The peer broke the protocol."""
    EXPIRED = "expired"
    COMPUTE = "compute"
    """The sender could not compute the KV."""


@dataclass(frozen=True, slots=True)
class CommitMark:
    """The sender's statement that all KV of `content` is in parts 0 to `parts` - 1, and final."""

    parts: int
    content: Content
