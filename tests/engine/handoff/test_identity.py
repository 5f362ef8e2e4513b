from __future__ import annotations

from dataclasses import replace

import pytest
from trtmesh.chassis.block_hashes import root_hash
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.handoff.identity import compatibility_hash, content_of

KIND = ("model", "tokenizer", 4, 2, 8)
ADAPTER = Adapter(1, "french", "v1")


@pytest.mark.parametrize(
    "other",
    [
        ("other", "tokenizer", 4, 2, 8),
        ("model", "other", 4, 2, 8),
        ("model", "tokenizer", 2, 4, 8),
        ("model", "tokenizer", 4, 4, 8),
        ("model", "tokenizer", 4, 2, 16),
    ],
)
def test_hash_covers_each_property(other: tuple[object, ...]) -> None:
    assert compatibility_hash(other) != compatibility_hash(KIND)


def test_hash_covers_the_version_of_the_adapter() -> None:
    of_adapter = compatibility_hash(KIND, ADAPTER)
    of_next = compatibility_hash(KIND, replace(ADAPTER, version="v2"))
    assert len({compatibility_hash(KIND), of_adapter, of_next}) == 3
    assert compatibility_hash(KIND, replace(ADAPTER, name="renamed")) == of_adapter


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
