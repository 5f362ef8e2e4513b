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
    """Whether a guess costs so little that one is made for every token, verified or not, to learn how many hold."""
    seconds_apart: float
    """CPU time of other threads for all guesses so far."""

    def propose(self, wishes: SequenceOf[Wish]) -> SequenceOf[SequenceOf[int]]:
        """Returns the drafts of each sequence, none where it has no guess. An exception is no drafts for a while."""

    def forget(self, sequence: Sequence) -> None:
        """Takes the end of a sequence, and drops what is kept for it."""
