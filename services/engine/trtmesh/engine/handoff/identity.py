"""The kind of KV and the tokens: they must be equal on both sides of a handoff."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import Content

PROTOCOL_VERSION = 1
DIGEST_BYTES = 16


def compatibility_hash(kind: Sequence[object], adapter: Adapter | None = None) -> bytes:
    """The hash of `kind`, the properties of KV that must be equal, for an item with `adapter`."""
    of_adapter = None if adapter is None else (adapter.id, adapter.version)
    fields = repr((PROTOCOL_VERSION, *kind, of_adapter))
    return blake2b(fields.encode(), digest_size=DIGEST_BYTES).digest()


def content_of(root_hash: int, token_ids: Sequence[int]) -> Content:
    """The content for tokens with blocks beginning at `root_hash`, the hash of adapter, salt and prompt table."""
    root = root_hash.to_bytes(8, "little")
    digest = blake2b(root + array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
    return Content(len(token_ids), digest)
