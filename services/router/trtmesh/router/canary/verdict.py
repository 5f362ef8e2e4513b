"""Whether a repetition is alike, and two against one: which of three workers computed something else. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isclose

from trtmesh.router.streams.sequence import COMPLETE, SequenceRun

LOG_PROB_TOLERANCE = 1e-5
"""Relative difference of summed log-probabilities: a sequence that moved is summed by the router, in other steps."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What a worker, or several in turn, generated as one sequence."""

    token_ids: Sequence[int]
    is_whole: bool
    """Whether a worker ended it: a repetition of a sequence that a stop text or a stop cut goes on."""
    log_prob: float | None = None
    """The sum of a whole sequence with log-probabilities."""

    @classmethod
    def of(cls, run: SequenceRun) -> Generated:
        is_whole = run.reason in COMPLETE and run.stop_text is None
        return cls(run.token_ids, is_whole, run.cumulative_log_prob if is_whole else None)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a repetition first differs."""

    sequence_index: int
    offset: int
    """The number of tokens of a sequence that differs in its log-probabilities alone."""


class Side(Enum):
    """Whose tokens two others contradict."""

    ITEM = "item"
    REPETITION = "repetition"
    UNKNOWN = "unknown"
    """Nobody's: there was no third, or all three differ."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a difference."""

    side: Side
    where: Difference


def judged(
    item: Sequence[Generated], second: Sequence[Generated], third: Sequence[Generated] | None
) -> Verdict | None:
    """Compares an item, its repetition and, where these differ, one by a third worker; None if all is as it should."""
    where = first_difference(item, second)
    if where is None:
        return None
    if third is None:
        return Verdict(Side.UNKNOWN, where)
    if first_difference(item, third) is None:
        return Verdict(Side.REPETITION, where)
    # The item may be cut short where the two go on alike.
    agree = first_difference(second, third) is None
    return Verdict(Side.ITEM if agree else Side.UNKNOWN, where)


def first_difference(kept: Sequence[Generated], again: Sequence[Generated]) -> Difference | None:
    """Where a repetition first differs from an item, by sequence."""
    for index, (one, other) in enumerate(zip(kept, again, strict=True)):
        offset = _first_other(one, other)
        if offset is not None:
            return Difference(index, offset)
    return None


def _first_other(kept: Generated, again: Generated) -> int | None:
    tokens, count = kept.token_ids, len(kept.token_ids)
    others = again.token_ids if kept.is_whole else again.token_ids[:count]
    if tokens != others:
        pairs = enumerate(zip(tokens, others, strict=False))
        return next((at for at, (a, b) in pairs if a != b), min(count, len(others)))
    if kept.log_prob is None or again.log_prob is None:
        return None
    is_same = isclose(
        kept.log_prob, again.log_prob, rel_tol=LOG_PROB_TOLERANCE, abs_tol=LOG_PROB_TOLERANCE
    )
    return None if is_same else count
