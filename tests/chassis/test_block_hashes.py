"""Names of KV blocks."""

from __future__ import annotations

from trtmesh.chassis.block_hashes import ROOT_HASH, chain, extend_names, root_hash
from trtmesh.chassis.vocabulary import Adapter


def test_chain_names_only_full_blocks() -> None:
    assert chain(ROOT_HASH, [1, 2, 3], 4) == []
    assert len(chain(ROOT_HASH, [1, 2, 3, 4, 5], 4)) == 1


def test_block_hash_covers_all_tokens_before() -> None:
    one, other = chain(ROOT_HASH, [1, 2, 3, 4], 2), chain(ROOT_HASH, [9, 2, 3, 4], 2)
    assert one[1] != other[1]
    assert chain(one[0], [3, 4], 2) == one[1:]


def test_salt_changes_the_names() -> None:
    roots = {root_hash(None), root_hash(""), root_hash("a"), root_hash("b")}
    assert len(roots) == 4
    assert len({chain(root, [1, 2], 2)[0] for root in roots}) == 4


def test_root_hash_depends_on_every_part() -> None:
    roots = [
        root_hash(),
        root_hash(""),
        root_hash("a"),
        root_hash(adapter=Adapter(1, version="v1")),
        root_hash(adapter=Adapter(1, version="v2")),
        root_hash(adapter=Adapter(11, version="")),
        root_hash(prompt_table_digest=b"a"),
        root_hash("a", adapter=Adapter(1, version="v1")),
        root_hash("a", adapter=Adapter(1, version="v1"), prompt_table_digest=b"a"),
    ]
    assert len(set(roots)) == len(roots)


def test_names_are_extended_from_last_known_block() -> None:
    tokens = list(range(12))
    names = list(chain(ROOT_HASH, tokens, 4))
    known = names[:1]
    assert extend_names(known, ROOT_HASH, tokens, 4, 3) is known
    assert known == names
    assert extend_names(known, ROOT_HASH, tokens, 4, 1) == names
