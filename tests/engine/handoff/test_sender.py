"""Single transitions; tests/handoff explores all of them together."""

from __future__ import annotations

import pytest
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem
from trtmesh.engine.handoff.sender import (
    AbortFetch,
    Action,
    AnnouncePart,
    Commit,
    EndSequence,
    Event,
    Expire,
    FetchLost,
    FetchOpened,
    FreeBlocks,
    PartComputed,
    Phase,
    Received,
    RefuseFetch,
    Release,
    SendConfirmed,
    SenderLease,
    SendMark,
    SequenceEnded,
    TakeBlocks,
    advance,
)
from trtmesh.engine.kv_memory import Content

MARK = CommitMark(2, Content(7, b"tokens"))
COMPUTED: list[Event] = [PartComputed(), PartComputed(), Commit(MARK)]


def after(*events: Event) -> tuple[SenderLease, list[Action]]:
    """A new lease after some events, and all actions."""
    lease, done = SenderLease(), list[Action]()
    for event in events:
        lease, actions = advance(lease, event)
        done += actions
    return lease, done


def test_parts_leave_as_they_are_computed() -> None:
    lease, actions = after(FetchOpened(), *COMPUTED, Received())
    assert actions == [
        AnnouncePart(0),
        AnnouncePart(1),
        TakeBlocks(),
        SendMark(MARK),
        SendConfirmed(),
        FreeBlocks(),
    ]
    assert (lease.phase, lease.outcome) == (Phase.CLOSED, Outcome.CONSUMED)


def test_a_late_fetch_gets_everything() -> None:
    _, actions = after(*COMPUTED, FetchOpened())
    assert actions == [TakeBlocks(), AnnouncePart(0), AnnouncePart(1), SendMark(MARK)]


@pytest.mark.parametrize(
    ("event", "outcome", "problem"),
    [
        (Release(), Outcome.RELEASED, None),
        (Expire(), Outcome.EXPIRED, Problem.EXPIRED),
        (FetchLost(), Outcome.RELEASED, Problem.PEER_LOST),
    ],
)
def test_a_lease_ends_with_its_sequence_or_its_blocks(
    event: Event, outcome: Outcome, problem: Problem | None
) -> None:
    lease, actions = after(PartComputed(), event)
    assert (lease.phase, lease.outcome) == (Phase.CLOSED, outcome)
    assert actions == [EndSequence(problem)]
    lease, actions = after(*COMPUTED, event)
    assert (lease.phase, lease.outcome) == (Phase.CLOSED, outcome)
    assert actions == [TakeBlocks(), FreeBlocks()]


def test_an_ended_lease_sends_nothing() -> None:
    lease, actions = after(FetchOpened(), *COMPUTED, Expire(), Received(), FetchOpened())
    assert actions[-3:] == [AbortFetch(), FreeBlocks(), RefuseFetch()]
    assert lease.outcome is Outcome.EXPIRED


def test_a_sequence_that_ends_before_its_handoff_aborts_the_fetch() -> None:
    lease, actions = after(FetchOpened(), SequenceEnded())
    assert actions == [AbortFetch()]
    assert lease.outcome is Outcome.RELEASED


def test_a_lease_has_one_fetch() -> None:
    assert after(FetchOpened(), FetchOpened())[1] == [RefuseFetch()]


def test_nothing_is_confirmed_before_the_commit() -> None:
    lease, actions = after(FetchOpened(), PartComputed(), Received())
    assert actions == [AnnouncePart(0), AbortFetch(), EndSequence(Problem.PROTOCOL)]
    assert lease.phase is Phase.CLOSED
