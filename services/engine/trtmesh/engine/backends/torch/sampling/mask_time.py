"""Bounds the time for masks in a step.

A mask takes microseconds, but under a grammar with many readings of a text up to some 35 ms. So a step makes masks for
`STEP_SECONDS`, those expected to take least first. A row without its mask sits out: its logits are kept, and later
steps make the mask. Each step without a mask that took longer than expected makes the one that waits longest, however
long it takes. So others wait in a step for its time and that of one such mask.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from trtmesh.engine.backends.torch.guided.grammars import (
    TOGETHER_SECONDS,
    FillTogether,
    Guide,
    GuideCounts,
    Matcher,
)

if TYPE_CHECKING:
    from trtmesh.engine.backends.torch.sampling.continuation import Continuation

log = logging.getLogger(__name__)

STEP_SECONDS = 0.01
"""CPU time for the masks of a step."""
LEAST_TOGETHER = 4
"""Fewer masks are made one by one."""


class MaskTime:
    """Makes the masks of guided sequences within the time of a step."""

    def __init__(self, counts: GuideCounts, fill_together: FillTogether | None = None) -> None:
        """Without `fill_together` masks are made one by one."""
        self._counts = counts
        self._fill_together = fill_together
        self.seconds_left = 0.0
        """CPU time left in this step. The engine sets STEP_SECONDS for each."""

    def late(self, guided: Iterable[Continuation]) -> set[int]:
        """Makes the masks of the next tokens of guided sequences. Returns the keys of those that have none yet."""
        guided = sorted(guided, key=_expected)
        if self._fill_together and len(guided) >= LEAST_TOGETHER:
            self._make_together(self._fill_together, guided)
        return {
            sequence.key
            for sequence in guided
            if _expected(sequence) > self.seconds_left or not self._makes(sequence)
        }

    def late_again(self, waiting: Sequence[Continuation]) -> set[int]:
        """`late` of the sequences that `late` returned in earlier steps, the longest waiting first."""
        late = self.late(waiting)
        first = next((sequence for sequence in waiting if sequence.key in late), None)
        if first and self.seconds_left > 0 and self._makes(first):
            late.remove(first.key)
        return late

    def _make_together(self, fill_together: FillTogether, guided: Sequence[Continuation]) -> None:
        """Makes the masks that take little time together; after a failure none, and they are made one by one."""
        together: list[tuple[Continuation, Guide, Matcher]] = []
        for sequence in guided:
            guide, has_time = sequence.guide, self.seconds_left > TOGETHER_SECONDS
            if guide and has_time and guide.last_seconds <= STEP_SECONDS / 2:
                before = guide.seconds
                # One that fails is met again alone.
                with suppress(Exception):
                    if place := guide.place(sequence.tokens, STEP_SECONDS):
                        together.append((sequence, guide, place))
                self._spend(guide.seconds - before)
        if not together:
            return
        places = [place for _, _, place in together]
        rows = np.empty((len(places), places[0].mask_bytes), dtype=np.uint8)
        began = time.perf_counter()
        try:
            fill_together(places, rows)
        except Exception:
            log.exception("masks could not be filled together")
            return
        took = time.perf_counter() - began
        # After a long one each is measured again.
        each = took if took > STEP_SECONDS else min(took, TOGETHER_SECONDS)
        for row, (sequence, guide, _) in zip(rows, together, strict=True):
            guide.take(row, sequence.rule.end_ids, each)
            self._counts.not_followed += bool(guide.problem)
        self._spend(took)

    def _makes(self, sequence: Continuation) -> bool:
        guide = sequence.guide
        assert guide
        before, end_ids = guide.seconds, sequence.rule.end_ids
        try:
            is_made = guide.makes(sequence.tokens, end_ids, STEP_SECONDS)
        except Exception:  # noqa: BLE001 - the choice meets it again, and ends this item alone
            is_made = True
        took = guide.seconds - before
        self._spend(took)
        self._counts.not_followed += bool(took and guide.problem)
        return is_made

    def _spend(self, seconds: float) -> None:
        self.seconds_left -= seconds
        self._counts.mask_seconds += seconds


def _expected(sequence: Continuation) -> float:
    guide = sequence.guide
    assert guide
    return guide.last_seconds
