"""Names of KV blocks: the hash of a block covers its tokens and, by its parent's hash, all tokens before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = 0
"""Parent of the first block of a sequence without a salt."""


def root_of(salt: str | None) -> int:
    """Parent of the first block under `salt`, so that equal tokens under different salts have different names."""
    return ROOT if salt is None else _hash(b"salt" + salt.encode())


def chain(parent: int, token_ids: Sequence[int], tokens_per_block: int) -> list[int]:
    """Hashes of the full blocks of `token_ids`, which follow the block `parent`."""
    hashes = []
    for end in range(tokens_per_block, len(token_ids) + 1, tokens_per_block):
        tokens = array("I", token_ids[end - tokens_per_block : end])
        parent = _hash(parent.to_bytes(8, "little") + tokens.tobytes())
        hashes.append(parent)
    return hashes


def _hash(content: bytes) -> int:
    # 0 is the root's name, so no block may have it.
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") or 1
