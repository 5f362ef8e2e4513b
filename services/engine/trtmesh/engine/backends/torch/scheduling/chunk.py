"""A part of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtmesh.engine.backends.torch.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int
    given_logits: Tensor | None = None
    """Logits [positions, vocabulary] that the sequence's reader wants, once the chunk is computed."""

    @property
    def completes(self) -> bool:
        """Whether a next token can be chosen after it."""
        return self.start + self.count == len(self.sequence.tokens)
