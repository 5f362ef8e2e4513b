"""Single transitions; tests/handoff explores all of them together."""

from __future__ import annotations

import pytest
from trtmesh.router.fleet.handoff import (
    Action,
    Cancelled,
    Event,
    Given,
    Handoff,
    Late,
    Offered,
    ReceiverFailed,
    ReceiverStarted,
    Reserved,
    Result,
    Resumed,
    SenderCommitted,
    SenderFailed,
    SenderFinished,
    adopt,
    advance,
    begin,
    park,
)


def after(*events: Event, parked: bool = False) -> tuple[Handoff, list[Action]]:
    """A new handoff after some events, and all actions."""
    handoff, first = park() if parked else begin()
    done = list(first)
    for event in events:
        handoff, actions = advance(handoff, event)
        done += actions
    return handoff, done


def test_prefill_starts_after_the_reservation() -> None:
    assert after()[1] == [Action.RESERVE]
    assert after(Reserved())[1] == [Action.RESERVE, Action.START_SENDER]


def test_receiver_fetches_during_the_prefill_and_continues_after_it() -> None:
    handoff, actions = after(Reserved(), Offered(), SenderCommitted(), ReceiverStarted())
    assert actions[2:] == [Action.ATTACH, Action.SUBMIT, Action.RELEASE_SENDER]
    assert handoff.result is Result.MOVED


def test_an_end_carries_the_descriptor_too() -> None:
    assert after(Reserved(), SenderCommitted())[1][2:] == [Action.ATTACH, Action.SUBMIT]


def test_a_parked_item_gets_its_receiver_later() -> None:
    handoff, actions = after(Offered(), SenderCommitted(), parked=True)
    assert handoff.is_parked
    assert actions == [Action.START_SENDER]
    handoff, actions = after(Offered(), SenderCommitted(), Resumed(), Reserved(), parked=True)
    assert actions == [Action.START_SENDER, Action.RESERVE, Action.ATTACH, Action.SUBMIT]


def test_a_client_brings_two_halves_together() -> None:
    handoff, actions = after(Offered(), SenderCommitted(), Given(), Cancelled(), parked=True)
    assert handoff.result is Result.GIVEN
    assert actions == [Action.START_SENDER]
    second, first_actions = adopt()
    assert first_actions == (Action.RESERVE,)
    assert advance(second, Reserved())[1] == (Action.ATTACH, Action.SUBMIT)


@pytest.mark.parametrize("event", [Late(), ReceiverFailed()])
def test_a_failure_releases_both_workers_and_migrates(event: Event) -> None:
    handoff, actions = after(Reserved(), Offered(), event)
    assert actions[-3:] == [Action.RELEASE_SENDER, Action.RELEASE_RECEIVER, Action.MIGRATE]
    assert handoff.result is Result.MIGRATED


def test_a_cancelled_item_releases_both_workers() -> None:
    handoff, actions = after(Reserved(), Offered(), SenderCommitted(), Cancelled())
    assert actions[-2:] == [Action.RELEASE_SENDER, Action.RELEASE_RECEIVER]
    assert handoff.result is Result.CANCELLED


def test_the_loss_of_a_committed_sender_is_left_to_the_receiver() -> None:
    handoff, _ = after(Reserved(), Offered(), SenderCommitted(), SenderFailed())
    assert handoff.is_live
    handoff, actions = after(Reserved(), Offered(), SenderFailed())
    assert actions[-2:] == [Action.RELEASE_RECEIVER, Action.MIGRATE]
    handoff, _ = after(SenderCommitted(), SenderFailed(), parked=True)
    assert handoff.result is Result.MIGRATED


def test_a_finished_sequence_needs_no_receiver() -> None:
    handoff, actions = after(Reserved(), SenderFinished())
    assert actions[-1] == Action.RELEASE_RECEIVER
    assert handoff.result is Result.FINISHED


def test_an_ended_handoff_ignores_everything() -> None:
    handoff, actions = after(Late(), Reserved(), SenderCommitted(), ReceiverStarted(), Cancelled())
    assert actions == [Action.RESERVE, Action.RELEASE_RECEIVER, Action.MIGRATE]
    assert handoff.result is Result.MIGRATED
