"""The number of worthwhile drafts in a step, by measurement.

A draft accepted with probability p is worth p tokens, and costs the time of a row. A step of `rows` sequences yields
`rows` tokens in the `plain` time, so a draft pays where p > cost * rows / plain. The plain time and the cost are
learned from the steps, for each size of a batch: the extra time of a step is fitted by a fixed cost and a cost per
draft. Drafts are tried at unknown cost, and now and then where they did not pay.

Of many uncertain shares the highest are mostly too high, so drafts that should pay may not. What steps with drafts have
gained is compared with what they took: after a loss only drafts of twice the worth are chosen, for a while.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

MOST_DRAFTS = 8
"""Most drafts of a sequence in a step."""
MARGIN = 1.1
"""Drafts must be worth so many times their cost."""
PLAIN_WEIGHT = 0.1
"""Weight of a step in the plain time."""
DECAY = 0.97
"""Weight of a step with drafts beside the next."""
PRIOR = 0.3
"""Weight of the assumed cost, in steps of four drafts."""
ASSUMED_SHARE = 0.5
"""Assumed cost of a draft, as a share of the cost of a sequence in a batch of at least four."""
MOST_MARGIN = 16 * MARGIN
FIRST_RETRY, RETRY_STEPS = 16, 512
"""Where drafts do not pay, some are tried again after so many steps: at first soon, since a single step may have been
slow for another reason, then after twice as many each time, up to the second number."""
LEAST_JUDGED, JUDGED = 2, 32
"""Steps with drafts after which a loss may be noticed, and after which a gain is believed."""
PLAIN_EVERY = 64
"""Where they pay, a step in so many has none."""
FIRST_TRIAL, MOST_AHEAD = 2, 2048
"""Steps launched ahead before drafts are tried: first `FIRST_TRIAL`, then four times as many each time, at most
`MOST_AHEAD`."""
TRIAL_STEPS = 4
"""Least number of trial steps with a wait for drafts."""
TRIAL_DECAY = 0.97
TRIALS_AFTER = 256
"""Where drafts pay, launches ahead are tried again after so many steps with a wait."""
OUTLIER = 3.0
"""A time is cut to so many times the expected time: the rest has another cause than the step."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step, and the work done."""

    rows: int
    """Number of sequences in the step."""
    drafts: int
    held: int
    """Accepted drafts."""
    seconds: float
    is_ahead: bool
    """Whether the step was launched before the preceding tokens were known."""
    is_typical: bool = True
    """Whether only the drafts explain the time."""


class Lengths(Protocol):
    """Decides the number of drafts."""

    def waits(self, rows: int) -> bool:
        """Whether a step of `rows` sequences waits for the preceding tokens, and so may have drafts, instead of a
        launch ahead."""

    def choose(self, rows: int, rates: SequenceOf[float], most: SequenceOf[int]) -> SequenceOf[int]:
        """The drafts of each sequence, at most `most`, in a step of `rows` sequences; `rates` are the shares of
        accepted drafts."""

    def measured(self, step: StepTime) -> None:
        """Takes the time of a step with one token per sequence, besides drafts."""


class AdaptiveLengths:
    """Implements Lengths."""

    def __init__(self) -> None:
        self._costs: dict[int, StepCosts] = {}

    def waits(self, rows: int) -> bool:
        return self._costs_of(rows).pace.waits

    def choose(self, rows: int, rates: SequenceOf[float], most: SequenceOf[int]) -> SequenceOf[int]:
        none = [0] * len(most)
        costs = self._costs_of(rows)
        if not costs.plain or costs.drafted_in_a_row >= PLAIN_EVERY:
            return none
        token = costs.account.margin * rows / costs.plain
        price, fixed = costs.each * token, costs.fixed * token
        lengths = [_paying(rate, cap, price) for rate, cap in zip(rates, most, strict=True)]
        worth = sum(map(_expected, rates, lengths)) - price * sum(lengths)
        if worth > fixed:
            return lengths
        # How many drafts come is up to the drafter: steps without any do not count.
        if costs.plain_in_a_row >= costs.account.retry_after:
            return [min(2, each) for each in most]
        return none

    def measured(self, step: StepTime) -> None:
        costs = self._costs_of(step.rows)
        costs.pace.add(step)
        if step.is_typical and not step.is_ahead:
            costs.add(step)

    def _costs_of(self, rows: int) -> StepCosts:
        # Batches of a similar size share measurements.
        shift = max(0, rows.bit_length() - 4)
        return self._costs.setdefault(rows >> shift << shift, StepCosts())


def _paying(rate: float, most: int, price: float) -> int:
    """Drafts with a higher rate than price."""
    count, holds = 0, rate
    while count < most and holds > price:
        count += 1
        holds *= rate
    return count


def _expected(rate: float, drafts: int) -> float:
    """Expected accepted drafts of so many."""
    return rate * (1 - rate**drafts) / (1 - rate)


class Pace:
    """Whether steps wait for drafts. A step launched ahead takes less time, so drafts must make up for more than their
    own. Steps wait for a trial now and then, and on, while they give more tokens in the time."""

    def __init__(self) -> None:
        self.waits = False
        self._ahead = 0.0
        """Seconds of a step launched ahead, per sequence; 0 while unknown."""
        self._steps = 0
        """Steps of this kind since the last change between waiting and launching ahead."""
        self._retry_after = FIRST_TRIAL
        # Of steps with a wait: tokens per sequence, and seconds.
        self._tokens = self._seconds = 0.0

    def add(self, step: StepTime) -> None:
        seconds = step.seconds / step.rows
        if step.is_ahead == self.waits:
            # The step was launched before the last change.
            return
        self._steps += 1
        if step.is_ahead:
            seconds = min(seconds, OUTLIER * (self._ahead or seconds))
            self._ahead += (PLAIN_WEIGHT if self._ahead else 1.0) * (seconds - self._ahead)
            if self._steps >= self._retry_after:
                self._change()
            return
        self._tokens = TRIAL_DECAY * self._tokens + 1 + step.held / step.rows
        most = 2 * OUTLIER * self._ahead * (1 + step.drafts / step.rows)
        self._seconds = TRIAL_DECAY * self._seconds + min(seconds, most)
        gain = self._tokens * self._ahead / self._seconds
        # The fewer steps, the more may be chance.
        if self._steps >= TRIAL_STEPS and gain < 1 - 2 / self._steps:
            self._retry_after = min(4 * self._retry_after, MOST_AHEAD)
            self._change()
        elif self._steps >= TRIALS_AFTER:
            # The other kind is measured again.
            self._retry_after = FIRST_TRIAL
            self._change()

    def _change(self) -> None:
        self.waits = not self.waits
        self._steps = 0
        self._tokens = self._seconds = 0.0


class Account:
    """What drafts have cost and gained, in seconds, and what follows for the next."""

    def __init__(self) -> None:
        self.margin = MARGIN
        """Drafts must be worth so many times their cost."""
        self.retry_after = FIRST_RETRY
        """Steps without drafts before the next trial."""
        self._steps, self._drafts, self._cost, self._gain = 0, 0, 0.0, 0.0

    def add(self, drafts: int, cost: float, gain: float) -> None:
        """Takes a step with drafts."""
        self._steps += 1
        self._drafts += drafts
        self._cost += cost
        self._gain += gain
        # The fewer drafts, the more may be chance.
        least = self._cost * (1 - 2 / sqrt(self._drafts))
        if self._steps >= LEAST_JUDGED and self._gain < least:
            self._begin(min(2 * self.margin, MOST_MARGIN))
        elif self._steps >= JUDGED:
            self.retry_after = FIRST_RETRY
            self._begin(max(self.margin / 2, MARGIN))

    def tried(self) -> None:
        """Drafts were tried again."""
        self.retry_after = min(2 * self.retry_after, RETRY_STEPS)
        self._begin(max(self.margin / 2, MARGIN))

    def _begin(self, margin: float) -> None:
        self.margin = margin
        self._steps, self._drafts, self._cost, self._gain = 0, 0, 0.0, 0.0


class StepCosts:
    """The times of steps of about equally many sequences."""

    def __init__(self) -> None:
        self.plain = 0.0
        """Seconds of a step without drafts; 0 while unknown."""
        self.fixed = self.each = 0.0
        """Further seconds of a step with drafts, and of each draft."""
        self.plain_in_a_row = self.drafted_in_a_row = 0
        self.account = Account()
        self.pace = Pace()
        # Sums over steps with drafts: 1, drafts, drafts², seconds beyond the plain time, and the latter times drafts.
        self._sums = [0.0] * 5

    def add(self, step: StepTime) -> None:
        if not step.drafts:
            self._add_plain(step.rows, step.seconds)
        elif self.plain:
            self._add_drafted(step)

    def _add_plain(self, rows: int, seconds: float) -> None:
        if self.plain:
            seconds = min(seconds, OUTLIER * self.plain)
            self.plain += PLAIN_WEIGHT * (seconds - self.plain)
        else:
            self.plain = seconds
            self._fit(rows)
        self.plain_in_a_row += 1
        self.drafted_in_a_row = 0

    def _add_drafted(self, step: StepTime) -> None:
        rows, drafts = step.rows, step.drafts
        most = OUTLIER * self.plain * (rows + drafts) / rows
        extra = min(step.seconds, most) - self.plain
        news = (1.0, drafts, drafts * drafts, extra, extra * drafts)
        self._sums = [DECAY * old + new for old, new in zip(self._sums, news, strict=True)]
        self._fit(rows)
        self.drafted_in_a_row += 1
        if self.plain_in_a_row >= self.account.retry_after:
            self.account.tried()
        self.plain_in_a_row = 0
        self.account.add(drafts, extra, self.plain * step.held / rows)

    def _fit(self, rows: int) -> None:
        """Least squares, drawn to no fixed cost and the assumed cost of each draft."""
        count, drafts, squares, extra, products = self._sums
        count += PRIOR
        squares += PRIOR * 16
        products += PRIOR * 16 * ASSUMED_SHARE * self.plain / max(4, rows)
        determinant = count * squares - drafts * drafts
        self.fixed = max(0.0, (extra * squares - drafts * products) / determinant)
        self.each = max(0.0, (products - drafts * self.fixed) / squares)
