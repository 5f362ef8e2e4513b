"""Single transitions of a lease by state; tests/handoff explores them together with the router's."""

from __future__ import annotations

import pytest
from trtmesh.engine.handoff.lease import Outcome
from trtmesh.engine.handoff.state_sender import (
    Action,
    Event,
    Expire,
    HandedOver,
    Phase,
    Release,
    SequenceEnded,
    StateLease,
    advance,
)

STOP, DROP = Action.STOP_SEQUENCE, Action.DROP


def after(*events: Event) -> tuple[StateLease, list[Action]]:
    """A new lease after some events, and all actions."""
    lease, done = StateLease(), list[Action]()
    for event in events:
        lease, actions = advance(lease, event)
        done += actions
    return lease, done


def test_kv_stays_after_the_handoff() -> None:
    assert after(HandedOver()) == (StateLease(Phase.KEPT), [])


@pytest.mark.parametrize(
    ("event", "early", "late"),
    [
        (Release(), Outcome.RELEASED, Outcome.RELEASED),
        (Release(consumed=True), Outcome.RELEASED, Outcome.CONSUMED),
        (Expire(), Outcome.EXPIRED, Outcome.EXPIRED),
    ],
)
def test_a_lease_ends_with_its_sequence_or_its_kv(
    event: Event, early: Outcome, late: Outcome
) -> None:
    assert after(event) == (StateLease(Phase.CLOSED, early), [STOP, DROP])
    assert after(HandedOver(), event) == (StateLease(Phase.CLOSED, late), [DROP])


@pytest.mark.parametrize("event", [SequenceEnded(), HandedOver(can_travel=False)])
def test_a_sequence_without_a_usable_state_ends_its_lease(event: Event) -> None:
    assert after(event) == (StateLease(Phase.CLOSED, Outcome.RELEASED), [DROP])


@pytest.mark.parametrize("can_travel", [True, False])
def test_a_handoff_after_the_end_of_its_lease_is_dropped(can_travel: bool) -> None:
    lease, actions = after(Expire(), HandedOver(can_travel), Release(consumed=True))
    assert (lease.outcome, actions) == (Outcome.EXPIRED, [STOP, DROP, DROP])
