"""Events of KV blocks."""

from __future__ import annotations

from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import BlocksRemoved, BlocksStored
from trtmesh.engine.ledger import KvEventLog


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
