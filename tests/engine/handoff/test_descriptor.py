"""A receiver checks a descriptor before it uses anything of it."""

from __future__ import annotations

import pytest
from trtmesh.engine.handoff.descriptor import Incompatible, parse
from trtmesh.engine.handoff.identity import PROTOCOL_VERSION
from trtmesh.v1 import kv_transfer_pb2 as pb

OWN = b"own hash"


@pytest.mark.parametrize(
    ("version", "digest", "why"),
    [
        (PROTOCOL_VERSION + 1, OWN, f"version {PROTOCOL_VERSION + 1}"),
        (PROTOCOL_VERSION, b"other hash", "another model, tokenizer or adapter"),
        (PROTOCOL_VERSION, b"", "another model, tokenizer or adapter"),
        (PROTOCOL_VERSION, OWN, "unknown shape|no blocks"),
    ],
)
def test_version_and_hash_are_checked_before_the_rest(
    version: int, digest: bytes, why: str
) -> None:
    """The rest of this descriptor is missing."""
    descriptor = pb.HandoffDescriptor(protocol_version=version, compatibility_hash=digest)
    with pytest.raises(Incompatible, match=why):
        parse(descriptor, OWN)
