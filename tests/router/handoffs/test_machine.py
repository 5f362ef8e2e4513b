"""Single transitions; tests/handoff explores all of them together."""

from __future__ import annotations

from itertools import product

import pytest
from trtmesh.router.handoffs.machine import (
    Action,
    Event,
    Handoff,
    Result,
    adopt,
    advance,
    begin,
    begin_by_state,
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
    assert after(Event.RESERVED)[1] == [Action.RESERVE, Action.START_SENDER]


def test_receiver_fetches_during_the_prefill_and_continues_after_it() -> None:
    handoff, actions = after(
        Event.RESERVED, Event.OFFERED, Event.SENDER_COMMITTED, Event.RECEIVER_STARTED
    )
    assert actions[2:] == [Action.ATTACH, Action.SUBMIT, Action.RELEASE_SENDER]
    assert handoff.result is Result.MOVED


def test_an_end_carries_the_descriptor_too() -> None:
    assert after(Event.RESERVED, Event.SENDER_COMMITTED)[1][2:] == [Action.ATTACH, Action.SUBMIT]


def test_a_parked_item_gets_its_receiver_later() -> None:
    handoff, actions = after(Event.OFFERED, Event.SENDER_COMMITTED, parked=True)
    assert handoff.is_parked
    assert actions == [Action.START_SENDER]
    handoff, actions = after(
        Event.OFFERED, Event.SENDER_COMMITTED, Event.RESUMED, Event.RESERVED, parked=True
    )
    assert actions == [Action.START_SENDER, Action.RESERVE, Action.ATTACH, Action.SUBMIT]


def test_a_client_brings_two_halves_together() -> None:
    handoff, actions = after(
        Event.OFFERED, Event.SENDER_COMMITTED, Event.GIVEN, Event.CANCELLED, parked=True
    )
    assert handoff.result is Result.GIVEN
    assert actions == [Action.START_SENDER]
    second, first_actions = adopt()
    assert first_actions == (Action.RESERVE,)
    assert advance(second, Event.RESERVED)[1] == (Action.ATTACH, Action.SUBMIT)


@pytest.mark.parametrize("event", [Event.LATE, Event.RECEIVER_FAILED])
def test_a_failure_releases_both_workers_and_migrates(event: Event) -> None:
    handoff, actions = after(Event.RESERVED, Event.OFFERED, event)
    assert actions[-3:] == [Action.RELEASE_SENDER, Action.RELEASE_RECEIVER, Action.MIGRATE]
    assert handoff.result is Result.MIGRATED


def test_a_cancelled_item_releases_both_workers() -> None:
    handoff, actions = after(Event.RESERVED, Event.OFFERED, Event.SENDER_COMMITTED, Event.CANCELLED)
    assert actions[-2:] == [Action.RELEASE_SENDER, Action.RELEASE_RECEIVER]
    assert handoff.result is Result.CANCELLED


def test_the_loss_of_a_committed_sender_is_left_to_the_receiver() -> None:
    handoff, _ = after(Event.RESERVED, Event.OFFERED, Event.SENDER_COMMITTED, Event.SENDER_FAILED)
    assert handoff.is_live
    handoff, actions = after(Event.RESERVED, Event.OFFERED, Event.SENDER_FAILED)
    assert actions[-2:] == [Action.RELEASE_RECEIVER, Action.MIGRATE]
    handoff, _ = after(Event.SENDER_COMMITTED, Event.SENDER_FAILED, parked=True)
    assert handoff.result is Result.MIGRATED


def test_a_finished_sequence_needs_no_receiver() -> None:
    handoff, actions = after(Event.RESERVED, Event.SENDER_FINISHED)
    assert actions[-1] == Action.RELEASE_RECEIVER
    assert handoff.result is Result.FINISHED


def test_an_ended_handoff_ignores_everything() -> None:
    handoff, actions = after(
        Event.LATE, Event.RESERVED, Event.SENDER_COMMITTED, Event.RECEIVER_STARTED, Event.CANCELLED
    )
    assert actions == [Action.RESERVE, Action.RELEASE_RECEIVER, Action.MIGRATE]
    assert handoff.result is Result.MIGRATED


class TestByState:
    """The receiver has no lease: it gets the sender's state with its sequence."""

    def after(self, *events: Event) -> tuple[Result | None, list[Action]]:
        handoff, first = begin_by_state()
        done = list(first)
        for event in events:
            handoff, actions = advance(handoff, event)
            done += actions
        return handoff.result, done

    def test_prefill_starts_at_once_and_the_receiver_after_it(self) -> None:
        assert self.after()[1] == [Action.START_SENDER]
        assert self.after(Event.SENDER_COMMITTED)[1] == [Action.START_SENDER, Action.SUBMIT]

    def test_sender_is_told_that_its_state_was_used(self) -> None:
        result, actions = self.after(Event.SENDER_COMMITTED, Event.RECEIVER_STARTED)
        assert result is Result.MOVED
        assert actions[-1] is Action.CONFIRM_SENDER

    @pytest.mark.parametrize("before", [[], [Event.SENDER_COMMITTED]])
    @pytest.mark.parametrize("fault", [Event.LATE, Event.RECEIVER_FAILED])
    def test_fault_releases_the_sender_alone(self, before: list[Event], fault: Event) -> None:
        result, actions = self.after(*before, fault)
        assert result is Result.MIGRATED
        assert actions[-2:] == [Action.RELEASE_SENDER, Action.MIGRATE]
        assert Action.RELEASE_RECEIVER not in actions

    def test_sender_that_fails_before_its_handoff_is_left(self) -> None:
        assert self.after(Event.SENDER_FAILED) == (
            Result.MIGRATED,
            [Action.START_SENDER, Action.MIGRATE],
        )

    def test_receiver_may_have_pulled_before_the_sender_failed(self) -> None:
        assert self.after(Event.SENDER_COMMITTED, Event.SENDER_FAILED)[0] is None

    def test_client_that_leaves_releases_the_sender(self) -> None:
        for before in ([], [Event.SENDER_COMMITTED]):
            result, actions = self.after(*before, Event.CANCELLED)
            assert result is Result.CANCELLED
            assert actions[-1] is Action.RELEASE_SENDER

    def test_every_order_of_events_ends_what_it_began(self) -> None:
        events: list[Event] = [
            *(Event.OFFERED, Event.SENDER_COMMITTED, Event.SENDER_FINISHED, Event.SENDER_FAILED),
            *(Event.RECEIVER_FAILED, Event.RECEIVER_STARTED, Event.CANCELLED, Event.LATE),
        ]
        for order in product(events, repeat=5):
            result, actions = self.after(*order)
            ends = [each for each in actions if each in _ENDS_OF_SENDER]
            assert actions.count(Action.SUBMIT) <= 1
            assert not {Action.RESERVE, Action.ATTACH, Action.RELEASE_RECEIVER} & {*actions}
            assert (Action.MIGRATE in actions) is (result is Result.MIGRATED)
            if result in (Result.MOVED, Result.CANCELLED):
                assert len(ends) == 1
            assert len(ends) <= (result is not None)


_ENDS_OF_SENDER = (Action.CONFIRM_SENDER, Action.RELEASE_SENDER)
