"""Rules for admitting, pausing and cutting sequences into steps."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.engine.scheduling.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class SchedulingRules:
    """Settings of the scheduler."""

    tokens_per_block: int
    max_step_tokens: int
    chunk_tokens: int | None = None
    """Most tokens of a sequence in a step; None computes all missing tokens at once, up to a full step."""
    never_pause: bool = False
    """Whether a sequence starts only when the pool can hold its longest form."""
    static_batch: bool = False
    """Whether a batch starts only after the end of the previous batch."""
    prefix_reuse: bool = True
    """Whether equal prefixes share blocks."""
    partial_reuse: bool = True
    """Whether the matching part of a block is copied."""
    max_adapters: int = 0
    """Slots for adapters on the device."""
    window: int | None = None
    """Size of the sliding window, including the present token; None for all tokens."""

    def __post_init__(self) -> None:
        if self.static_batch and not self.never_pause:
            raise ValueError(
                "a static batch needs never_pause: a paused sequence would join the next batch"
            )

    @property
    def prompt_tokens_per_step(self) -> int:
        """Most tokens of a prompt in a step."""
        return min(self.max_step_tokens, self.chunk_tokens or self.max_step_tokens)

    def blocks(self, tokens: int) -> int:
        """Blocks for this many tokens."""
        return -(-tokens // self.tokens_per_block)

    def unseen_blocks(self, tokens: int) -> int:
        """Leading blocks outside the window of the next token and of all later tokens."""
        if self.window is None:
            return 0
        return max(0, tokens + 1 - self.window) // self.tokens_per_block

    def sent_from(self, sequence: ScheduledSequence) -> int:
        """The first block of a sequence to send to the receiver."""
        return self.unseen_blocks(sequence.prompt_tokens - 1)

    def kept_from(self, sequence: ScheduledSequence) -> int:
        """The first token of a received sequence with all KV in the window. Until the handoff of a prompt, a sender
        keeps the window of the last prompt token, and later the window of the next token."""
        received = len(sequence.tokens) - 1
        return received if received > sequence.prompt_tokens else sequence.prompt_tokens - 1

    def first_whole_block(self, sequence: ScheduledSequence) -> int:
        """The first block of a received sequence sent whole by the sender."""
        if self.window is None:
            return 0
        return self.blocks(max(0, self.kept_from(sequence) + 1 - self.window))

    def growth(self, sequence: ScheduledSequence) -> int:
        """Blocks to keep free for a running sequence."""
        to_come = self.blocks_to_come(sequence, len(sequence.blocks))
        return to_come if self.never_pause else min(1, to_come)

    def blocks_to_come(self, sequence: ScheduledSequence, blocks: int) -> int:
        """Further blocks for the longest form of a sequence with `blocks` blocks. The last token needs no KV, nor a
        token after the handoff."""
        if sequence.is_pinned:
            return 0
        longest = max(sequence.rule.limit - 1, len(sequence.tokens))
        return max(0, self.blocks(longest) - blocks)

    def chunk(self, lacking: int, left: int, *, first: bool) -> int:
        """Tokens to compute of `lacking` in a step with `left` tokens to give; `first` in an empty step.

        A sequence always gets at least a token, so the batch advances together.
        """
        if self.chunk_tokens is not None:
            return min(lacking, max(1, min(left, self.chunk_tokens)))
        whole = min(lacking, self.max_step_tokens)
        return whole if first or whole <= max(1, left) else 0
