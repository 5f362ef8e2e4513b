"""Single transitions; tests/handoff explores all of them together."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from trtmesh.engine.backend import Content
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem
from trtmesh.engine.handoff.receive_machine import (
    AnyReceiverAction,
    AnyReceiverEvent,
    Attach,
    Bind,
    Committed,
    PartReady,
    ReadEnded,
    ReadPart,
    ReceiverAction,
    ReceiverEvent,
    ReceiverLease,
    ReceiverPhase,
    ReportFailure,
    StopTarget,
    advance,
)

CONTENT = Content(7, b"tokens")
MARK = CommitMark(2, CONTENT)
PARTS: list[AnyReceiverEvent] = [PartReady(0), PartReady(1)]
READS: list[AnyReceiverEvent] = [ReadEnded(0), ReadEnded(1)]


def after(*events: AnyReceiverEvent) -> tuple[ReceiverLease, list[AnyReceiverAction]]:
    """A new lease after some events, and all actions."""
    lease, done = ReceiverLease(), list[AnyReceiverAction]()
    for event in events:
        lease, actions = advance(lease, event)
        done += actions
    return lease, done


def test_streamed_parts_are_consumed_with_the_commit_mark() -> None:
    lease, actions = after(Bind(CONTENT), Attach(False), *PARTS, *READS, Committed(MARK))
    assert actions == [
        ReceiverAction.OPEN_FETCH,
        ReadPart(0),
        ReadPart(1),
        ReceiverAction.SEND_RECEIVED,
        ReceiverAction.CLOSE_FETCH,
        ReceiverAction.CONSUME,
    ]
    assert (lease.phase, lease.outcome) == (ReceiverPhase.CONSUMED, Outcome.CONSUMED)
    assert not lease.expires


def test_reads_of_the_senders_memory_wait_for_the_confirmation() -> None:
    events: list[AnyReceiverEvent] = [Bind(CONTENT), Attach(True), *PARTS, Committed(MARK), *READS]
    lease, actions = after(*events)
    assert lease.phase is ReceiverPhase.FETCHING
    assert actions[-1] == ReceiverAction.SEND_RECEIVED
    assert after(*events, ReceiverEvent.CONFIRMED)[1][-2:] == [
        ReceiverAction.CLOSE_FETCH,
        ReceiverAction.CONSUME,
    ]


def test_a_late_submit_finds_the_complete_kv() -> None:
    events: list[AnyReceiverEvent] = [Attach(False), *PARTS, *READS, Committed(MARK)]
    lease, actions = after(*events)
    assert lease.phase is ReceiverPhase.COMPLETE
    assert lease.expires
    assert ReceiverAction.CONSUME not in actions
    assert after(*events, Bind(CONTENT))[1][-1] == ReceiverAction.CONSUME


def test_kv_of_other_tokens_is_not_consumed() -> None:
    lease, actions = after(
        Attach(False), *PARTS, *READS, Committed(MARK), Bind(Content(7, b"others"))
    )
    assert actions[-2:] == [StopTarget(Problem.WRONG_TOKENS), ReceiverAction.FREE_BLOCKS]
    assert lease.outcome is Outcome.RELEASED


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([ReceiverEvent.REFUSED], Problem.INCOMPATIBLE),
        ([Attach(False), ReceiverEvent.FETCH_LOST], Problem.PEER_LOST),
        ([Attach(False), PartReady(1)], Problem.PROTOCOL),
        ([Attach(False), PartReady(0), ReadEnded(0), Committed(MARK)], Problem.PROTOCOL),
        ([Attach(True), ReceiverEvent.CONFIRMED], Problem.PROTOCOL),
        ([Attach(False), PartReady(0), ReadEnded(0, Problem.CHECKSUM)], Problem.CHECKSUM),
        ([ReceiverEvent.EXPIRED], Problem.EXPIRED),
    ],
)
def test_a_failure_is_reported_and_frees_the_blocks(
    events: Iterable[AnyReceiverEvent], problem: Problem
) -> None:
    lease, actions = after(*events)
    assert actions[-2:] == [ReportFailure(problem), ReceiverAction.FREE_BLOCKS]
    assert lease.phase is ReceiverPhase.CLOSED
    assert lease.outcome is (Outcome.EXPIRED if problem is Problem.EXPIRED else Outcome.RELEASED)


def test_quarantine_ends_with_the_last_read() -> None:
    events: list[AnyReceiverEvent] = [Attach(False), *PARTS, ReceiverEvent.RELEASED]
    lease, actions = after(*events)
    assert (lease.phase, lease.outcome) == (ReceiverPhase.QUARANTINED, Outcome.RELEASED)
    assert not lease.expires
    assert actions[-1] == ReceiverAction.CLOSE_FETCH
    lease, actions = after(*events, ReadEnded(1))
    assert lease.phase is ReceiverPhase.QUARANTINED
    lease, actions = after(*events, ReadEnded(1), ReadEnded(0))
    assert lease.phase is ReceiverPhase.CLOSED
    assert actions.count(ReceiverAction.FREE_BLOCKS) == 1


def test_a_lease_takes_one_sequence() -> None:
    assert after(Bind(CONTENT), Bind(CONTENT))[1] == [ReceiverAction.REFUSE_SEQUENCE]
    assert after(ReceiverEvent.RELEASED, Bind(CONTENT))[1] == [
        ReceiverAction.FREE_BLOCKS,
        ReceiverAction.REFUSE_SEQUENCE,
    ]


def test_a_repeated_part_is_read_once() -> None:
    assert after(Attach(False), PartReady(0), PartReady(0))[1] == [
        ReceiverAction.OPEN_FETCH,
        ReadPart(0),
    ]
