"""Names of KV blocks: the hash of a block covers its tokens and, by its parent's hash, all tokens before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT_HASH = 0
"""Parent of the first block of a sequence without a salt."""


def root_hash(salt: str | None) -> int:
    """Parent of the first block under `salt`, so that equal tokens under different salts have different names."""
    return ROOT_HASH if salt is None else _hash(b"salt" + salt.encode())


def block_hash(parent_hash: int, token_ids: Sequence[int]) -> int:
    """Name of a full block."""
    return _hash(parent_hash.to_bytes(8, "little") + array("I", token_ids).tobytes())


def chain(parent_hash: int, token_ids: Sequence[int], tokens_per_block: int) -> list[int]:
    """Names of the full blocks of `token_ids`, which follow the block `parent_hash`."""
    hashes = []
    for end in range(tokens_per_block, len(token_ids) + 1, tokens_per_block):
        parent_hash = block_hash(parent_hash, token_ids[end - tokens_per_block : end])
        hashes.append(parent_hash)
    return hashes


def _hash(content: bytes) -> int:
    # 0 is the root's name, so no block may have it.
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") or 1
