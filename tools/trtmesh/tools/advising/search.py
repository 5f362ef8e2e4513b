"""The fewest engines that keep a goal. More of a kind never hurt, up to chance, so counts are bisected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trtmesh.tools.advising.forecast import Counts, Forecast

IDLE, GAIN = 0.5, 0.001
"""Engines busy for a smaller share, of which twice as many gain no more good answers, fail for want of speed."""
SCANNED = 8
"""Engines up to which every division between prefill and decode is tried."""

Probe = Callable[[Counts], Forecast]


@dataclass(slots=True)
class Search:
    """Looks for the least fleet. `probes` are the forecasts so far, each made once."""

    probe: Probe
    attainment: float
    most: int
    """Most engines of a fleet."""
    probes: dict[Counts, Forecast] = field(default_factory=dict)

    def mixed(self, guess: int = 1) -> Forecast | None:
        """The fewest mixed engines; None if none of the allowed numbers will do."""
        held = self._least(lambda n: self._at(Counts(n)), 1, max(1, guess))
        return self._at(Counts(held)) if held else None

    def disaggregated(self, most: int) -> Forecast | None:
        """The fewest prefill and decode engines, at most so many; None if none of these will do."""
        if most < 2:
            return None
        guess = min(most, self.most)
        total = self._least(self._best_split, 2, guess, min(most, self.most))
        return self._best_split(total) if total else None

    @property
    def largest(self) -> int:
        """Engines of the largest fleet tried."""
        return max(counts.total for counts in self.probes)

    def holds(self, found: Forecast) -> bool:
        return found.attainment >= self.attainment

    def _at(self, counts: Counts) -> Forecast:
        if counts not in self.probes:
            self.probes[counts] = self.probe(counts)
        return self.probes[counts]

    def _least(
        self, at: Callable[[int], Forecast], lowest: int, guess: int, most: int | None = None
    ) -> int:
        """The least number that holds, 0 if none up to `most`. Doubles until one holds, then bisects."""
        fails, most = lowest - 1, most or self.most
        number, before = min(max(guess, lowest), most), -1.0
        while not self.holds(found := at(number)):
            gains = found.attainment > before + GAIN
            if number == most or (max(found.busy.values()) < IDLE and not gains):
                return 0
            fails, number, before = number, min(2 * number, most), found.attainment
        holds = number
        while holds - fails > 1:
            middle = (holds + fails) // 2
            if self.holds(at(middle)):
                holds = middle
            else:
                fails = middle
        return holds

    def _best_split(self, total: int) -> Forecast:
        """Of the fleets with so many engines the first that holds, or the best one."""
        low, high = 1, total - 1
        while high - low >= SCANNED:
            # Too few of either kind fail, so that the share of good answers has one peak.
            third = (high - low) // 3
            left = self._at(Counts(0, low + third, total - low - third))
            right = self._at(Counts(0, high - third, total - high + third))
            for each in (left, right):
                if self.holds(each):
                    return each
            if left.attainment < right.attainment:
                low += third
            else:
                high -= third
        best = self._at(Counts(0, low, total - low))
        for prefill in range(low, high + 1):
            each = self._at(Counts(0, prefill, total - prefill))
            if self.holds(each):
                return each
            best = max(best, each, key=lambda found: found.attainment)
        return best
