"""Names of KV blocks: the hash of a block covers the tokens and, through the parent's hash, all tokens before.

Engines name cached blocks by these hashes and routers the blocks of a prompt, so both use this module.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from trtmesh.chassis.vocabulary import Adapter

ROOT_HASH = 0
"""Parent of the first block of a sequence without a salt."""

TOKEN_BYTES = array("I").itemsize


def root_hash(
    salt: str | None = None,
    *,
    adapter: Adapter | None = None,
    prompt_table_digest: bytes | None = None,
) -> int:
    """Parent of the first block: gives equal tokens different names where their KV differs or must not be shared.

    Of the adapter, id and version count. `prompt_table_digest` is the digest of the embeddings of the ids above the
    vocabulary. The model does not count, because a worker serves one model for its life.
    """
    if salt is None and adapter is None and prompt_table_digest is None:
        return ROOT_HASH
    parts = (
        (b"salt", None if salt is None else salt.encode()),
        (b"adapter", None if adapter is None else f"{adapter.id}:{adapter.version}".encode()),
        (b"table", prompt_table_digest),
    )
    # Length prefixes keep different sets of parts distinct.
    content = b"".join(
        name + len(part).to_bytes(8, "little") + part for name, part in parts if part is not None
    )
    return _number(blake2b(content, digest_size=8).digest())


def chain(parent_hash: int, token_ids: Sequence[int], tokens_per_block: int) -> list[int]:
    """Names of the full blocks of `token_ids` after the block `parent_hash`."""
    content = array("I", token_ids).tobytes()
    size = tokens_per_block * TOKEN_BYTES
    hashes = []
    for end in range(size, len(content) + 1, size):
        parent = parent_hash.to_bytes(8, "little")
        parent_hash = _number(blake2b(parent + content[end - size : end], digest_size=8).digest())
        hashes.append(parent_hash)
    return hashes


def extend_names(
    hashes: list[int], root: int, tokens: Sequence[int], tokens_per_block: int, count: int
) -> list[int]:
    """Extends the names of a sequence's leading full blocks to at least `count`; `root` is the parent of the first."""
    known = len(hashes)
    if known < count:
        parent = hashes[-1] if hashes else root
        following = tokens[known * tokens_per_block : count * tokens_per_block]
        hashes += chain(parent, following, tokens_per_block)
    return hashes


def _number(digest: bytes) -> int:
    # 0 is reserved for the root.
    return int.from_bytes(digest, "little") or 1
