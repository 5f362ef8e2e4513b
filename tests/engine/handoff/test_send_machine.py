"""Single transitions; tests/handoff explores all of them together."""

from __future__ import annotations

import pytest
from trtmesh.engine.backend import Content
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem
from trtmesh.engine.handoff.send_machine import (
    AnnouncePart,
    AnySenderAction,
    AnySenderEvent,
    Commit,
    SenderAction,
    SenderEvent,
    SenderLease,
    SenderPhase,
    SendMark,
    StopSource,
    advance,
)

MARK = CommitMark(2, Content(7, b"tokens"))
COMPUTED: list[AnySenderEvent] = [
    SenderEvent.PART_COMPUTED,
    SenderEvent.PART_COMPUTED,
    Commit(MARK),
]


def after(*events: AnySenderEvent) -> tuple[SenderLease, list[AnySenderAction]]:
    """A new lease after some events, and all actions."""
    lease, done = SenderLease(), list[AnySenderAction]()
    for event in events:
        lease, actions = advance(lease, event)
        done += actions
    return lease, done


def test_parts_leave_as_they_are_computed() -> None:
    lease, actions = after(SenderEvent.FETCH_OPENED, *COMPUTED, SenderEvent.RECEIVED)
    assert actions == [
        AnnouncePart(0),
        AnnouncePart(1),
        SenderAction.TAKE_KV,
        SendMark(MARK),
        SenderAction.SEND_CONFIRMED,
        SenderAction.FREE_KV,
    ]
    assert (lease.phase, lease.outcome) == (SenderPhase.CLOSED, Outcome.CONSUMED)


def test_a_late_fetch_gets_everything() -> None:
    _, actions = after(*COMPUTED, SenderEvent.FETCH_OPENED)
    assert actions == [SenderAction.TAKE_KV, AnnouncePart(0), AnnouncePart(1), SendMark(MARK)]


@pytest.mark.parametrize(
    ("event", "outcome", "problem"),
    [
        (SenderEvent.RELEASED, Outcome.RELEASED, None),
        (SenderEvent.EXPIRED, Outcome.EXPIRED, Problem.EXPIRED),
        (SenderEvent.FETCH_LOST, Outcome.RELEASED, Problem.PEER_LOST),
    ],
)
def test_a_lease_ends_with_its_sequence_or_its_blocks(
    event: AnySenderEvent, outcome: Outcome, problem: Problem | None
) -> None:
    lease, actions = after(SenderEvent.PART_COMPUTED, event)
    assert (lease.phase, lease.outcome) == (SenderPhase.CLOSED, outcome)
    assert actions == [StopSource(problem)]
    lease, actions = after(*COMPUTED, event)
    assert (lease.phase, lease.outcome) == (SenderPhase.CLOSED, outcome)
    assert actions == [SenderAction.TAKE_KV, SenderAction.FREE_KV]


def test_an_ended_lease_sends_nothing() -> None:
    lease, actions = after(
        SenderEvent.FETCH_OPENED,
        *COMPUTED,
        SenderEvent.EXPIRED,
        SenderEvent.RECEIVED,
        SenderEvent.FETCH_OPENED,
    )
    assert actions[-3:] == [
        SenderAction.ABORT_FETCH,
        SenderAction.FREE_KV,
        SenderAction.REFUSE_FETCH,
    ]
    assert lease.outcome is Outcome.EXPIRED


def test_a_sequence_that_ends_before_its_handoff_aborts_the_fetch() -> None:
    lease, actions = after(SenderEvent.FETCH_OPENED, SenderEvent.SEQUENCE_ENDED)
    assert actions == [SenderAction.ABORT_FETCH]
    assert lease.outcome is Outcome.RELEASED


def test_a_lease_has_one_fetch() -> None:
    assert after(SenderEvent.FETCH_OPENED, SenderEvent.FETCH_OPENED)[1] == [
        SenderAction.REFUSE_FETCH
    ]


def test_nothing_is_confirmed_before_the_commit() -> None:
    lease, actions = after(
        SenderEvent.FETCH_OPENED, SenderEvent.PART_COMPUTED, SenderEvent.RECEIVED
    )
    assert actions == [AnnouncePart(0), SenderAction.ABORT_FETCH, StopSource(Problem.PROTOCOL)]
    assert lease.phase is SenderPhase.CLOSED


@pytest.mark.parametrize("commit", [Commit(), Commit(MARK)])
def test_kv_is_consumed_once_it_is_committed(commit: Commit) -> None:
    lease, actions = after(SenderEvent.CONSUMED)
    assert (lease.outcome, actions) == (Outcome.RELEASED, [StopSource(None)])
    lease, actions = after(commit, SenderEvent.CONSUMED)
    assert lease.outcome is Outcome.CONSUMED
    assert actions == [SenderAction.TAKE_KV, SenderAction.FREE_KV]


def test_kv_stays_after_the_handoff() -> None:
    lease, actions = after(Commit(), SenderEvent.SEQUENCE_ENDED)
    assert (lease.phase, lease.outcome) == (SenderPhase.COMMITTED, None)
    assert actions == [SenderAction.TAKE_KV]


def test_kv_handed_over_after_the_end_of_its_lease_is_freed() -> None:
    lease, actions = after(SenderEvent.EXPIRED, Commit(), SenderEvent.CONSUMED)
    assert lease.outcome is Outcome.EXPIRED
    assert actions == [StopSource(Problem.EXPIRED), SenderAction.FREE_KV]
