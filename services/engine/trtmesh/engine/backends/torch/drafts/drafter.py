"""The seam to a source of drafts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from trtmesh.engine.backends.torch.sequence import Sequence

Wish = tuple[Sequence, int]
"""A sequence, and the most drafts of use."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences. Neither the guesses nor their number change any output."""

    is_free: bool
    """Whether a guess is nearly free. Then every token gets a guess, verified or not, to learn the share of right
    guesses."""
    seconds_apart: float
    """CPU time of other threads for all guesses so far."""

    def propose(self, wishes: SequenceOf[Wish]) -> SequenceOf[SequenceOf[int]]:
        """Returns the drafts of each sequence, none without a guess. An exception pauses the drafts."""

    def forget(self, sequence: Sequence) -> None:
        """Takes the end of a sequence, and drops all data of the sequence."""
