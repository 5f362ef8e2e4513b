"""A sequence as the scheduler sees it: tokens, computed KV and blocks. Rules for cutting sequences into steps."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from trtmesh.chassis.block_hashes import ROOT_HASH
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.adapter_store import StoredAdapter
from trtmesh.engine.backend import SequenceEnd
from trtmesh.engine.ledger import SequenceTimes
from trtmesh.engine.scheduling.leases import Outgoing

PRIORITY_STEPS = 256
"""A point of priority is worth so many steps of waiting."""
WHOLE_POINTS = 16
"""Priorities up to this, in either direction, are worth a point each; beyond, each doubling is worth a point. So no
order is lost, and the lowest priority does not starve."""

Rank = tuple[int, int, int]
"""Fixed place in every order: the lowest starts first and is preempted last. The step of arrival less the head start,
then the priority, highest first, then the arrival."""


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledSequence:
    """There are no phases: a sequence with fewer computed tokens than tokens has work."""

    key: int
    tokens: list[int]
    """Prompt and generated tokens."""
    rule: EndRule
    config: GenerationConfig
    submitted_tokens: int
    """Tokens received with the item: the prompt, and tokens from another worker."""
    leader: Self | None = None
    """Computes the shared prompt; this sequence begins with a copy of the KV."""
    adapter: StoredAdapter | None = None
    mates: list[Self] = field(default_factory=list)
    """Sequences admitted and paused only together, this sequence included. Mates share the list, and leave the list at
    their ends. Empty for a sequence alone."""
    root: int = ROOT_HASH
    """Parent hash of the first block: covers everything besides tokens with an effect on the KV."""
    num_computed: int = 0
    """Leading tokens with their KV in the blocks."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Hashes of leading full blocks, computed on demand."""
    num_dropped: int = 0
    """Leading blocks, released because no further token sees their KV."""
    num_published: int = 0
    """Leading blocks offered for reuse."""
    slot: int = -1
    """Row of the block table; -1 outside the batch."""
    rank: Rank = (0, 0, 0)
    lives: bool = False
    """Whether the scheduler has taken the sequence in and not removed it."""
    paused: bool = False
    """Whether the sequence has started and lost all blocks."""
    in_flight: bool = False
    """Whether a launched step has yet to deliver a token or logits: the sequence is neither scheduled nor preempted."""
    cached_prompt_tokens: int = 0
    outgoing: Outgoing | None = None
    """The sequence ends with this handoff after the next token."""
    is_prefill: bool = False
    """Whether shorter prompts go first, as on a prefill worker."""
    receiver_lease: str = ""
    """Lease of the awaited blocks; empty once the sequence has the blocks."""
    cumulative_log_prob: float | None = None
    times: SequenceTimes = field(default_factory=SequenceTimes)

    @property
    def prompt_tokens(self) -> int:
        return self.rule.prompt_tokens

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.rule.prompt_tokens

    @property
    def is_ready(self) -> bool:
        """False while a part of the item is being prepared, or KV of another worker awaited."""
        return self.is_prepared and not self.receiver_lease

    @property
    def is_prepared(self) -> bool:
        """Whether everything is there that is made outside of the steps."""
        return True

    @property
    def is_pinned(self) -> bool:
        """Whether the sequence starts with all blocks up to the handoff, and is not preempted."""
        return self.outgoing is not None and self.outgoing.is_pinned

    def let_go(self) -> None:
        """Drops large members at the end: some lists keep ended sequences for a while."""

    @property
    def head_start(self) -> int:
        """The priority advances the rank by so many steps."""
        priority = self.config.priority
        doublings = math.log2(max(WHOLE_POINTS, abs(priority)) / WHOLE_POINTS)
        points = min(WHOLE_POINTS, abs(priority)) + doublings
        return round(math.copysign(points * PRIORITY_STEPS, priority))

    @property
    def most_reusable(self) -> int:
        """Leading tokens that may reuse KV: their logits are not needed."""
        return len(self.tokens) - 1

    @property
    def pending_prompt_tokens(self) -> int:
        """Submitted tokens without KV; 0 while another worker sends the KV."""
        return 0 if self.receiver_lease else max(0, self.submitted_tokens - self.num_computed)

    def append(self, token: int, now_ns: int) -> bool:
        """Returns whether the token is the first on this worker."""
        self.tokens.append(token)
        times = self.times
        times.last_token_ns = now_ns
        if times.first_token_ns:
            return False
        times.first_token_ns = now_ns
        return True

    def end(
        self, reason: int, stop_token_ids: tuple[int, ...] = (), error: TrtmeshError | None = None
    ) -> SequenceEnd:
        """The end as delivered; call before the blocks are released."""
        times = self.times
        return SequenceEnd(
            key=self.key,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generated_tokens=self.generated_tokens,
            stop_token_ids=stop_token_ids,
            cumulative_log_prob=self.cumulative_log_prob,
            error=error,
            perf_metrics=times.perf_metrics() if self.config.output.perf_metrics else None,
            queue_seconds=times.queue_seconds,
        )


S = TypeVar("S", bound=ScheduledSequence)

Pairs = SequenceOf[tuple[S, S]]
"""Sequences, each with the sequence from whose KV it continues."""


@dataclass(slots=True)
class Chunk(Generic[S]):
    """Tokens [start, start + count) of a sequence, to be computed in a step; the last of them may be drafts."""

    sequence: S
    start: int
    count: int
    drafts: SequenceOf[int] = ()
    """Guesses of the tokens after the last known token, computed to be verified."""

    @property
    def known_end(self) -> int:
        return self.start + self.count - len(self.drafts)

    @property
    def completes(self) -> bool:
        """Whether the next token can be chosen afterwards."""
        return self.known_end == len(self.sequence.tokens)

    def drop_drafts(self) -> None:
        self.count -= len(self.drafts)
        self.drafts = ()


@dataclass(frozen=True, slots=True)
class SchedulingRules:
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
