"""How many drafts are worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
from trtmesh.engine.backends.torch.drafts.lengths import (
    MOST_DRAFTS,
    PAID_BACK,
    PLAIN_EVERY,
    RETRY_STEPS,
    AdaptiveLengths,
    StepTime,
)


def pairs(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Every pair of values in every run, and all combinations in `make soak`."""
    places = product(*(range(len(each)) for each in values.values()))
    return pytest.mark.parametrize(
        ",".join(values),
        [
            pytest.param(
                *(each[place] for each, place in zip(values.values(), chosen, strict=True)),
                marks=[] if sum(chosen) % 3 == 0 else pytest.mark.soak,
            )
            for chosen in places
        ],
    )


def held_of(drafts: int, rate: float, dice: Random) -> int:
    return next((held for held in range(drafts) if dice.random() >= rate), drafts)


def play(
    lengths: AdaptiveLengths,
    rows: int,
    rate: float,
    each: float,
    fixed: float = 0.0,
    steps: int = 1500,
    wait: float = 0.0,
    told: float | None = None,
) -> tuple[float, float]:
    """The tokens a second of steps with a plain time of 1, as a share of those without drafts, and the mean number of a
    sequence's drafts. Where steps may be launched ahead, `wait` is what one costs that waits for drafts. `rate` is the
    share of accepted drafts, `told` what it is thought to be."""
    dice = Random(rows)
    tokens, seconds, drafted, drafts = 0.0, 0.0, 0, 0
    rates, most = [told or rate] * rows, [MOST_DRAFTS] * rows
    for _ in range(steps):
        counts, took = [0] * rows, 1.0
        # The tokens after drafts depend on how many hold.
        is_ahead = wait > 0 and not drafts and not lengths.waits(rows, rates, most)
        if not is_ahead:
            counts = list(lengths.choose(rows, rates, most))
            took += wait + each * sum(counts) + fixed * (sum(counts) > 0)
        drafts = sum(counts)
        took *= dice.uniform(0.9, 1.1)
        held = sum(held_of(count, rate, dice) for count in counts)
        has_waited = wait > 0 and not is_ahead
        lengths.measured(StepTime(rows, drafts, held, took, is_ahead, has_waited=has_waited))
        tokens += rows + held
        seconds += took
        drafted += drafts
    return tokens / seconds / rows, drafted / steps / rows


@pairs(rows=[1, 16], rate=[0.1, 0.8, 0.95], cost=[0.02, 0.3, 1.0, 2.0], fixed=[0.0, 1.0])
def test_drafts_never_cost_more_than_they_are_worth(
    rows: int, rate: float, cost: float, fixed: float
) -> None:
    """`cost` is a draft's share of the time of a sequence."""
    gain, drafts = play(AdaptiveLengths(), rows, rate, cost / rows, fixed)
    assert gain > 0.97
    if cost >= 1:
        assert drafts < 0.2


@pairs(rows=[1, 16], rate=[0.1, 0.8, 0.95], cost=[0.02, 0.3, 1.0], wait=[0.1, 0.5])
def test_waiting_for_drafts_never_costs_more_than_they_are_worth(
    rows: int, rate: float, cost: float, wait: float
) -> None:
    best = max(
        sum(rate**k for k in range(count + 1)) / (1 + wait + cost * count)
        for count in range(MOST_DRAFTS + 1)
    )
    gain, drafts = play(AdaptiveLengths(), rows, rate, cost / rows, steps=3000, wait=wait)
    assert gain > 0.97 * max(1, 0.8 * best)
    if best < 0.95:
        assert drafts < 0.2


def test_trials_of_few_drafts_tell_what_many_cost() -> None:
    """As measured on a GPU with 16 sequences: a step with drafts costs the wait, however many these are."""
    gain, drafts = play(AdaptiveLengths(), 16, 0.7, 0.005, fixed=0.1, wait=0.6, steps=200)
    assert gain > 1.25
    assert drafts > 2


@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_trials_of_a_large_batch_cost_little_in_any_hundred_steps(rate: float) -> None:
    """As measured on a GPU: such a step takes three times as long, and waits."""
    lengths, gains = AdaptiveLengths(), list[float]()
    for _ in range(8):
        gains.append(play(lengths, 64, rate, 1.5 / 64, steps=100, wait=0.7, told=0.6)[0])
    assert min(gains[1:]) > 0.97


def test_trial_waits_until_plain_steps_have_paid_for_the_one_before() -> None:
    lengths, trials, lost = AdaptiveLengths(), list[int](), 2.0
    for step in range(1000):
        (drafts,) = lengths.choose(1, [0.02], [MOST_DRAFTS])
        lengths.measured(StepTime(1, drafts, 0, 1.0 + lost * (drafts > 0), is_ahead=False))
        if drafts:
            trials.append(step)
    first, second, *_ = trials
    assert second - first > lost / PAID_BACK


@pairs(rows=[1, 4, 16, 64], shares=[(0.33, 0.6), (0.1, 0.5), (0.02, 0.98)], cost=[0.3, 0.45, 0.8])
def test_shares_that_promise_too_much_cost_little(
    rows: int, shares: tuple[float, float], cost: float
) -> None:
    rate, told = shares
    gain, _ = play(AdaptiveLengths(), rows, rate, cost / rows, told=told)
    assert gain > 0.97


def test_drafts_come_back_once_shares_keep_what_they_promise() -> None:
    lengths = AdaptiveLengths()
    assert play(lengths, 4, 0.1, 0.45 / 4, told=0.6)[1] < 0.1
    gain, drafts = play(lengths, 4, 0.9, 0.1 / 4, steps=10 * RETRY_STEPS)
    assert gain > 2
    assert drafts > 4


def test_cheap_drafts_that_hold_are_many() -> None:
    gain, drafts = play(AdaptiveLengths(), 1, 0.9, 0.05)
    assert drafts > 6
    assert gain > 3
    gain, drafts = play(AdaptiveLengths(), 16, 0.8, 0.3 / 16)
    assert gain > 1.3
    assert 2 < drafts < 6


def test_a_change_is_noticed() -> None:
    lengths = AdaptiveLengths()
    assert play(lengths, 8, 0.8, 2.0 / 8)[1] < 0.2
    assert play(lengths, 8, 0.8, 0.05 / 8, steps=40 * RETRY_STEPS)[1] > 2
    assert play(lengths, 8, 0.8, 2.0 / 8, steps=40 * PLAIN_EVERY)[1] < 1
