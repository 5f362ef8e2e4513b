"""A backend's live keys and undelivered output."""

from __future__ import annotations

import pytest
from trtmesh.engine.backend import SequenceEnd
from trtmesh.engine.ledger import Ledger
from trtmesh.v1 import generation_pb2 as pb


def end_of(key: int) -> SequenceEnd:
    return SequenceEnd(key, pb.FINISH_REASON_LENGTH, 1, 0, 1)


def test_ended_key_is_not_live_and_ends_once() -> None:
    ledger = Ledger[str]()
    ledger.add(1, "one")
    ledger.add(2, "two")
    ledger.end(end_of(1))
    assert ledger.live == {2: "two"}
    with pytest.raises(KeyError):
        ledger.end(end_of(1))
    assert ledger.output.ends == [end_of(1)]


def test_take_returns_output_since_last_call() -> None:
    ledger = Ledger[str]()
    ledger.add(1, "one")
    ledger.output.keys.append(1)
    ledger.end(end_of(1))
    output = ledger.take(7)
    assert (output.step_count, output.keys, output.ends) == (7, [1], [end_of(1)])
    assert not ledger.take(8).ends
