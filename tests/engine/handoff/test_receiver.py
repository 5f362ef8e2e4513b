"""Single transitions; tests/handoff explores all of them together."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem
from trtmesh.engine.handoff.receiver import (
    Action,
    Attach,
    Bind,
    CloseFetch,
    Committed,
    Confirmed,
    Consume,
    EndSequence,
    Event,
    Expire,
    FetchLost,
    FreeBlocks,
    OpenFetch,
    PartReady,
    Phase,
    ReadEnded,
    ReadPart,
    ReceiverLease,
    Refuse,
    RefuseSequence,
    Release,
    ReportFailure,
    SendReceived,
    advance,
)
from trtmesh.engine.kv_memory import Content

CONTENT = Content(7, b"tokens")
MARK = CommitMark(2, CONTENT)
PARTS: list[Event] = [PartReady(0), PartReady(1)]
READS: list[Event] = [ReadEnded(0), ReadEnded(1)]


def after(*events: Event) -> tuple[ReceiverLease, list[Action]]:
    """A new lease after some events, and all actions."""
    lease, done = ReceiverLease(), list[Action]()
    for event in events:
        lease, actions = advance(lease, event)
        done += actions
    return lease, done


def test_streamed_parts_are_consumed_with_the_commit_mark() -> None:
    lease, actions = after(Bind(CONTENT), Attach(False), *PARTS, *READS, Committed(MARK))
    assert actions == [
        OpenFetch(),
        ReadPart(0),
        ReadPart(1),
        SendReceived(),
        CloseFetch(),
        Consume(),
    ]
    assert (lease.phase, lease.outcome) == (Phase.CONSUMED, Outcome.CONSUMED)
    assert not lease.expires


def test_reads_of_the_senders_memory_wait_for_the_confirmation() -> None:
    events: list[Event] = [Bind(CONTENT), Attach(True), *PARTS, Committed(MARK), *READS]
    lease, actions = after(*events)
    assert lease.phase is Phase.FETCHING
    assert actions[-1] == SendReceived()
    assert after(*events, Confirmed())[1][-2:] == [CloseFetch(), Consume()]


def test_a_late_submit_finds_the_complete_kv() -> None:
    events: list[Event] = [Attach(False), *PARTS, *READS, Committed(MARK)]
    lease, actions = after(*events)
    assert lease.phase is Phase.COMPLETE
    assert lease.expires
    assert Consume() not in actions
    assert after(*events, Bind(CONTENT))[1][-1] == Consume()


def test_kv_of_other_tokens_is_not_consumed() -> None:
    lease, actions = after(
        Attach(False), *PARTS, *READS, Committed(MARK), Bind(Content(7, b"others"))
    )
    assert actions[-2:] == [EndSequence(Problem.WRONG_TOKENS), FreeBlocks()]
    assert lease.outcome is Outcome.RELEASED


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([Refuse()], Problem.INCOMPATIBLE),
        ([Attach(False), FetchLost()], Problem.PEER_LOST),
        ([Attach(False), PartReady(1)], Problem.PROTOCOL),
        ([Attach(False), PartReady(0), ReadEnded(0), Committed(MARK)], Problem.PROTOCOL),
        ([Attach(True), Confirmed()], Problem.PROTOCOL),
        ([Attach(False), PartReady(0), ReadEnded(0, Problem.CHECKSUM)], Problem.CHECKSUM),
        ([Expire()], Problem.EXPIRED),
    ],
)
def test_a_failure_is_reported_and_frees_the_blocks(
    events: Iterable[Event], problem: Problem
) -> None:
    lease, actions = after(*events)
    assert actions[-2:] == [ReportFailure(problem), FreeBlocks()]
    assert lease.phase is Phase.CLOSED
    assert lease.outcome is (Outcome.EXPIRED if problem is Problem.EXPIRED else Outcome.RELEASED)


def test_quarantine_ends_with_the_last_read() -> None:
    events: list[Event] = [Attach(False), *PARTS, Release()]
    lease, actions = after(*events)
    assert (lease.phase, lease.outcome) == (Phase.QUARANTINED, Outcome.RELEASED)
    assert not lease.expires
    assert actions[-1] == CloseFetch()
    lease, actions = after(*events, ReadEnded(1))
    assert lease.phase is Phase.QUARANTINED
    lease, actions = after(*events, ReadEnded(1), ReadEnded(0))
    assert lease.phase is Phase.CLOSED
    assert actions.count(FreeBlocks()) == 1


def test_a_lease_takes_one_sequence() -> None:
    assert after(Bind(CONTENT), Bind(CONTENT))[1] == [RefuseSequence()]
    assert after(Release(), Bind(CONTENT))[1] == [FreeBlocks(), RefuseSequence()]


def test_a_repeated_part_is_read_once() -> None:
    assert after(Attach(False), PartReady(0), PartReady(0))[1] == [OpenFetch(), ReadPart(0)]
