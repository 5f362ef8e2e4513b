"""By which rules sequences are admitted, paused and cut into steps."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.engine.backends.torch.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulingRules:
    """What the settings come to for the scheduler."""

    tokens_per_block: int
    max_step_tokens: int
    chunk_tokens: int | None = None
    """Most tokens of one sequence in a step; None computes what a sequence lacks whole, if it fits a step at all."""
    never_pause: bool = False
    """Whether a sequence starts only when the pool holds it to its end."""
    static_batch: bool = False
    """Whether a batch starts only when the one before has wholly ended."""

    window: int | None = None
    """Tokens before and with it that a token sees; None where it sees all."""

    def __post_init__(self) -> None:
        if self.static_batch and not self.never_pause:
            raise ValueError("a static batch that pauses sequences would never end as one")

    def blocks(self, tokens: int) -> int:
        """Blocks that this many tokens fill."""
        return -(-tokens // self.tokens_per_block)

    def unseen_blocks(self, tokens: int) -> int:
        """Leading blocks that neither the token after this many nor a later one sees."""
        if self.window is None:
            return 0
        return max(0, tokens + 1 - self.window) // self.tokens_per_block

    def growth(self, sequence: Sequence) -> int:
        """Blocks kept free for a running sequence beyond those that it has."""
        to_come = self.blocks_to_come(sequence, len(sequence.blocks))
        return to_come if self.never_pause else min(1, to_come)

    def blocks_to_come(self, sequence: Sequence, blocks: int) -> int:
        """Blocks that a sequence with `blocks` of them may still need; the last token's KV never is."""
        longest = max(sequence.rule.limit - 1, len(sequence.tokens))
        return max(0, self.blocks(longest) - blocks)

    def chunk(self, lacking: int, left: int, *, first: bool) -> int:
        """Tokens to compute of `lacking` where the step has `left`; `first` where it has nothing yet.

        A sequence that lacks one token always gets it, so that the batch goes on together.
        """
        if self.chunk_tokens is not None:
            return min(lacking, max(1, min(left, self.chunk_tokens)))
        whole = min(lacking, self.max_step_tokens)
        return whole if first or whole <= max(1, left) else 0
