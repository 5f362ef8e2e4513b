"""The number of worthwhile drafts in a step, by measurement.

A draft accepted with probability p is worth p tokens, and costs the time of a row. A step of `rows` sequences yields
`rows` tokens in the `plain` time, so a draft pays where p > cost * rows / plain. The plain time and the cost are
learned from the steps, for each size of a batch: the extra time of a step is fitted by a fixed cost and a cost per
draft. Drafts are tried at unknown cost, and now and then where they did not pay: no sooner than the steps since have
paid for what was lost.

Where steps are launched ahead, the plain time is that of such a step, and the fixed cost has the wait for the preceding
tokens. A step waits where the drafts that seem to follow are worth the wait.

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
ASSUMED_SHARE, ASSUMED_SHARE_AHEAD = 0.5, 0.1
"""Assumed cost of a draft, as a share of the cost of a sequence in a batch of at least four: on a CPU, and on a device
that is launched ahead, whose steps take little longer with more rows."""
MOST_MARGIN = 16 * MARGIN
FIRST_RETRY, RETRY_STEPS = 16, 512
"""Where drafts do not pay, some are tried again after so many steps: at first soon, since a single step may have been
slow for another reason, then after twice as many each time, up to the second number."""
LEAST_JUDGED, JUDGED = 2, 32
"""Steps with drafts after which a loss may be noticed, and after which a gain is believed."""
PLAIN_EVERY = 64
"""Where they pay, a step in so many has none."""
TRIAL_DRAFTS = 16
"""Most drafts of a step that tries them."""
PAID_BACK = 0.01
"""Share of a plain step that pays for the losses of trials."""
OUTLIER = 3.0
"""A time is cut to so many times the expected time: the rest has another cause than the step."""


@dataclass(slots=True)
class StepTime:
    """The time of a step, and the work done."""

    rows: int
    """Number of sequences in the step; 0 for a step with other work than decoding."""
    drafts: int = 0
    held: int = 0
    """Accepted drafts."""
    seconds: float = 0.0
    is_ahead: bool = False
    """Whether the step was launched before the preceding tokens were known."""
    is_typical: bool = True
    """Whether only the drafts explain the time."""
    has_waited: bool = False
    """Whether drafts, be there any or not, kept the step from being launched ahead."""


class Lengths(Protocol):
    """Decides the number of drafts."""

    def waits(self, rows: int, rates: SequenceOf[float], most: SequenceOf[int]) -> bool:
        """Whether a step of `rows` sequences waits for the preceding tokens, and so may have drafts, instead of a
        launch ahead. `most` are drafts that could follow, if the token under way is as guessed."""

    def choose(self, rows: int, rates: SequenceOf[float], most: SequenceOf[int]) -> SequenceOf[int]:
        """The drafts of each sequence, at most `most`, in a step of `rows` sequences; `rates` are the shares of
        accepted drafts."""

    def measured(self, step: StepTime) -> None:
        """Takes the time of a step with one token per sequence, besides drafts."""


class AdaptiveLengths:
    """Implements Lengths."""

    def __init__(self) -> None:
        self._costs: dict[int, StepCosts] = {}

    def waits(self, rows: int, rates: SequenceOf[float], most: SequenceOf[int]) -> bool:
        return any(self._chosen(rows, rates, most, rates))

    def choose(self, rows: int, rates: SequenceOf[float], most: SequenceOf[int]) -> SequenceOf[int]:
        return self._chosen(rows, rates, most, [1.0] * len(most))

    def _chosen(
        self,
        rows: int,
        rates: SequenceOf[float],
        most: SequenceOf[int],
        chances: SequenceOf[float],
    ) -> SequenceOf[int]:
        """`choose` for drafts after tokens that are as guessed with these chances."""
        none = [0] * len(most)
        costs = self._costs_of(rows)
        if not costs.plain or costs.drafted_in_a_row >= PLAIN_EVERY:
            return none
        token = costs.account.margin * rows / costs.plain
        price, fixed = costs.each * token, costs.fixed * token
        lengths = [_paying(rate, cap, price) for rate, cap in zip(rates, most, strict=True)]
        gains = map(_expected, rates, lengths)
        worth = sum(a * b for a, b in zip(chances, gains, strict=True)) - price * sum(lengths)
        if worth > fixed and costs.are_known:
            return lengths
        # How many drafts come is up to the drafter: steps without any do not count.
        may_try = costs.plain_in_a_row >= costs.account.retry_after and costs.lost <= 0
        return _trial(most) if worth > fixed or may_try else none

    def measured(self, step: StepTime) -> None:
        if step.is_typical:
            self._costs_of(step.rows).add(step)

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


def _trial(most: SequenceOf[int]) -> list[int]:
    """A few drafts."""
    left, lengths = TRIAL_DRAFTS, list[int]()
    for each in most:
        lengths.append(min(2, each, left))
        left -= lengths[-1]
    return lengths


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
        least = self._cost * (1 - 2 / sqrt(max(1, self._drafts)))
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
        self.lost = 0.0
        """Plain steps in whose time drafts have lost more than they gained, without those paid back."""
        self._goes_ahead = False
        # Sums over steps with drafts: 1, drafts, drafts², seconds beyond the plain time, and the latter times drafts.
        self._sums = [0.0] * 5

    @property
    def are_known(self) -> bool:
        return self._sums[0] > 0

    def add(self, step: StepTime) -> None:
        if step.drafts or step.has_waited:
            if self.plain:
                self._add_drafted(step)
            return
        if step.is_ahead and not self._goes_ahead:
            self._goes_ahead, self.plain = True, 0.0
        # Other steps than those launched ahead are of batches that have just changed.
        if step.is_ahead == self._goes_ahead:
            self._add_plain(step.rows, step.seconds)

    def _add_plain(self, rows: int, seconds: float) -> None:
        if self.plain:
            seconds = min(seconds, OUTLIER * self.plain)
            self.plain += PLAIN_WEIGHT * (seconds - self.plain)
        else:
            self.plain = seconds
            self._fit(rows)
        self.plain_in_a_row += 1
        self.drafted_in_a_row = 0
        self.lost = max(0.0, self.lost - PAID_BACK)

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
        self.lost = max(0.0, self.lost + extra / self.plain - step.held / rows)
        self.account.add(drafts, extra, self.plain * step.held / rows)

    def _fit(self, rows: int) -> None:
        """Least squares, drawn to the assumed cost of each draft, and to no fixed cost where no step is launched
        ahead."""
        count, drafts, squares, extra, products = self._sums
        count += PRIOR * (not self._goes_ahead or not count)
        squares += PRIOR * 16
        share = ASSUMED_SHARE_AHEAD if self._goes_ahead else ASSUMED_SHARE
        products += PRIOR * 16 * share * self.plain / max(4, rows)
        determinant = count * squares - drafts * drafts
        self.fixed = max(0.0, (extra * squares - drafts * products) / determinant)
        self.each = max(0.0, (products - drafts * self.fixed) / squares)
