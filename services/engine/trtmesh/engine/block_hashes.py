"""Names of KV blocks: the hash of a block covers its tokens and, by its parent's hash, all tokens before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT_HASH = 0
"""Parent of the first block of a sequence without a salt."""


def root_hash(
    salt: str | None = None,
    *,
    adapter: tuple[int, str] | None = None,
    prompt_table_digest: bytes | None = None,
) -> int:
    """Parent of the first block, so that equal tokens whose KV differs, or may not be shared, have different names.

    `adapter` is id and version; `prompt_table_digest` is that of the embeddings which ids above the vocabulary mean.
    The model is not in it: a worker has one for its life, and what it tells of its blocks names it.
    """
    parts = (
        (b"salt", None if salt is None else salt.encode()),
        (b"adapter", None if adapter is None else f"{adapter[0]}:{adapter[1]}".encode()),
        (b"table", prompt_table_digest),
    )
    # With its length before each part no two sets of parts are spelt the same.
    content = b"".join(
        name + len(part).to_bytes(8, "little") + part for name, part in parts if part is not None
    )
    return _hash(content) if content else ROOT_HASH


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
