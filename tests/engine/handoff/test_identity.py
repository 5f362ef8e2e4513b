from __future__ import annotations

from dataclasses import replace

import pytest
from trtmesh.chassis.block_hashes import root_hash
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.handoff.identity import KvKind, content_of

KIND = KvKind("model", "tokenizer", 4, 2, 8)
ADAPTER = Adapter(1, "french", "v1")


@pytest.mark.parametrize(
    "other",
    [
        replace(KIND, model_fingerprint="other"),
        replace(KIND, tokenizer_fingerprint="other"),
        replace(KIND, layers=2, kv_heads=4),
        replace(KIND, kv_heads=4),
        replace(KIND, head_dim=16),
    ],
)
def test_hash_covers_each_field(other: KvKind) -> None:
    assert other.hash() != KIND.hash()
    assert replace(other).hash() == other.hash()


def test_hash_covers_the_version_of_the_adapter() -> None:
    hashes = {KIND.hash(), KIND.hash(ADAPTER), KIND.hash(replace(ADAPTER, version="v2"))}
    assert len(hashes) == 3
    assert KIND.hash(replace(ADAPTER, name="renamed")) == KIND.hash(ADAPTER)


def test_content_covers_tokens_and_root() -> None:
    content = content_of(root_hash(), [1, 2, 3])
    assert content == content_of(root_hash(), (1, 2, 3))
    assert content.tokens == 3
    others = [
        content_of(root_hash(), [1, 2]),
        content_of(root_hash(), [1, 3, 2]),
        content_of(root_hash("salt"), [1, 2, 3]),
        content_of(root_hash(adapter=ADAPTER), [1, 2, 3]),
    ]
    assert len({content.digest, *(each.digest for each in others)}) == 5
