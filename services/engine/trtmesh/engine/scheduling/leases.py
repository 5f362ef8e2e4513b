"""KV blocks on their way between workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """The blocks of a lease, each with a reference."""

    blocks: list[int]
    present_tokens: int = 0
    """Leading tokens with KV from the beginning of the lease."""


@dataclass(slots=True)
class Outgoing:
    """The handoff of a sequence to another worker."""

    lease_id: str
    tokens: int
    """Tokens with KV at the handoff; of a running sequence at least so many."""
    is_pinned: bool = True
    """Whether parts are announced from the start of the sequence on; of a running sequence all are at the handoff."""
    is_offered: bool = False
    first: int = 0
    """The first block to send."""
    announced: int = 0
    """Leading blocks, announced or not to be sent."""
    layers: int = 0
    """Layers announced of the blocks after them."""

    def is_announced_from(self, token: int, tokens_per_block: int) -> bool:
        """Whether anything announced is at `token` or later."""
        ahead = self.announced > self.first and self.announced * tokens_per_block > token
        return ahead or self.layers > 0
