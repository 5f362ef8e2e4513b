"""Counts, names and events of KV blocks."""

from __future__ import annotations

import pytest
from trtmesh.chassis.block_hashes import ROOT_HASH, chain
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import BlocksRemoved, BlocksStored
from trtmesh.engine.kv_blocks import KvEventLog, blocks_needed, extend_names


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_last_token_needs_no_block(tokens: int, blocks: int) -> None:
    assert blocks_needed(tokens, 4) == blocks


def test_names_are_extended_from_last_known_block() -> None:
    tokens = list(range(12))
    names = list(chain(ROOT_HASH, tokens, 4))
    known = names[:1]
    assert extend_names(known, ROOT_HASH, tokens, 4, 3) is known
    assert known == names
    assert extend_names(known, ROOT_HASH, tokens, 4, 1) == names


def test_chained_blocks_make_one_event() -> None:
    log = KvEventLog()
    log.stored(0, 1, [10, 11])
    log.stored(1, 2, [12, 13])
    log.stored(1, 3, [14, 15])
    assert log.take() == [
        BlocksStored(0, [1, 2], [10, 11, 12, 13]),
        BlocksStored(1, [3], [14, 15]),
    ]
    assert not log


def test_blocks_of_another_adapter_make_another_event() -> None:
    adapter = Adapter(id=1, name="a", version="v")
    log = KvEventLog()
    log.stored(0, 1, [10])
    log.stored(1, 2, [11], adapter)
    assert [event.adapter for event in log.take() if isinstance(event, BlocksStored)] == [
        None,
        adapter,
    ]


def test_consecutive_evictions_make_one_event() -> None:
    log = KvEventLog()
    log.removed([])
    assert not log
    log.removed([1])
    log.removed([2, 3])
    assert log.take() == [BlocksRemoved([1, 2, 3])]
