"""One sequence: its tokens, how many of them have their KV computed, and what it holds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trtmesh.chassis.block_hashes import ROOT_HASH, root_hash
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backend import (
    PerfMetrics,
    SequenceEnd,
    SequenceStart,
    StepOutput,
    Submission,
    TokenDetails,
)
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.stopping import EndRule

if TYPE_CHECKING:
    from trtmesh.engine.backends.torch.model.prompt_table import PromptTable
    from trtmesh.engine.backends.torch.model.prompt_tables import Lease
    from trtmesh.engine.backends.torch.sampling.readers import Reader

PRIORITY_STEPS = 256
"""Steps of waiting that a point of priority is worth; what waits long enough overtakes any priority."""
MOST_PRIORITY = 16
"""Points beyond which, above zero and below, priority counts no further; else what is lowest could wait for ever."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(Continuation):
    """A continuation and its KV. There are no phases: a sequence with fewer computed tokens than tokens has work."""

    config: GenerationConfig
    submitted_tokens: int
    """Tokens that came with the item: the prompt and what another worker generated."""
    request_id: str = ""
    """For the log."""
    deadline: float | None = None
    leader: Sequence | None = None
    """Sequence with the same prompt, which computes it; this one begins with a copy of its KV."""
    prompt_table: PromptTable | None = None
    """What ids after the vocabulary mean in the prompt."""
    table_lease: Lease | None = None
    """Memory of that table, which may still be read."""
    mates: list[Sequence] = field(default_factory=list)
    """Sequences with the same prompt that are admitted and paused only all together, this one among them; one list that
    all of them share and that each leaves at its end. Empty for one on its own."""
    root: int = ROOT_HASH
    """Parent hash of its first block: all that its KV depends on besides the tokens before."""
    num_computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Hashes of its leading full blocks, as far as they were needed."""
    num_dropped: int = 0
    """Leading blocks that no token to come will see, and that it no longer holds."""
    num_published: int = 0
    """Leading blocks that were offered for reuse."""
    slot: int = -1
    """Row of the block table while it is in the batch."""
    rank: tuple[int, int] = (0, 0)
    """Place in every order: lower goes first and is preempted last. Never changes."""
    paused: bool = False
    """Whether it had started and gave its blocks to others."""
    cached_prompt_tokens: int = 0
    reader: Reader | None = None
    """Still needs logits of submitted tokens."""
    times: Times = field(default_factory=lambda: Times(arrival_ns=time.time_ns()))

    @property
    def is_ready(self) -> bool:
        """Whether it has all that it needs to be computed; its prompt table may still be read."""
        return self.table_lease is None or self.prompt_table is not None

    def give_table(self, table: PromptTable) -> None:
        """Takes in what its lease is for."""
        self.prompt_table = table
        self.root = root_hash(self.config.kv_cache.salt, prompt_table_digest=table.digest)

    def let_go(self) -> None:
        """Drops what is large: some lists keep sequences that are over for a while."""
        self.prompt_table = self.reader = self.history = None
        if self.table_lease:
            self.table_lease.give_back()
            self.table_lease = None

    @property
    def head_start(self) -> int:
        """Steps that its priority lets it go before its time."""
        return max(-MOST_PRIORITY, min(MOST_PRIORITY, self.config.priority)) * PRIORITY_STEPS

    @property
    def most_reusable(self) -> int:
        """Leading tokens whose KV may come from elsewhere: those whose logits nobody wants."""
        last = len(self.tokens) - 1
        return last if self.reader is None else min(self.reader.next, last)

    @property
    def pending_prompt_tokens(self) -> int:
        """Submitted tokens whose KV is not computed."""
        return max(0, self.submitted_tokens - self.num_computed)

    def append(self, token: int, now_ns: int) -> None:
        """Adds a generated token."""
        self.tokens.append(token)
        times = self.times
        times.first_token_ns = times.first_token_ns or now_ns
        times.last_token_ns = now_ns

    def tell_next(
        self, token: int, details: TokenDetails | None, output: StepOutput, now_ns: int
    ) -> None:
        """Adds a generated token to its tokens and, with what is to be told of it, to the output of a step."""
        output.keys.append(self.key)
        output.token_offsets.append(self.generated_tokens)
        output.token_counts.append(1)
        output.token_ids.append(token)
        first = not self.times.first_token_ns
        self.append(token, now_ns)
        if first and self.config.output.perf_metrics:
            output.starts.append(SequenceStart(self.key, self.times.metrics_at_start()))
        if details:
            details.cumulative_log_prob = self.add_log_probs(details.log_probs)
            output.details.append(details)

    def end(
        self, reason: int, stop_token_ids: tuple[int, ...] = (), error: TrtmeshError | None = None
    ) -> SequenceEnd:
        """The end as it is delivered; while the sequence still holds its blocks."""
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
            queue_seconds=max(0, (times.scheduled_ns or time.time_ns()) - times.arrival_ns) / 1e9,
        )


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether the next token can be chosen after it."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class Times:
    """When things happened, in nanoseconds of the Unix clock, and how many blocks that took, over all its starts."""

    arrival_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    new_blocks: int = 0
    reused_blocks: int = 0

    def perf_metrics(self) -> PerfMetrics:
        return PerfMetrics(
            arrival_time_ns=self.arrival_ns,
            first_scheduled_time_ns=self.scheduled_ns,
            first_token_time_ns=self.first_token_ns,
            last_token_time_ns=self.last_token_ns,
            kv_cache_alloc_new_blocks=self.new_blocks,
            kv_cache_reused_blocks=self.reused_blocks,
            kv_cache_alloc_total_blocks=self.new_blocks,
        )

    def metrics_at_start(self) -> PerfMetrics:
        """What is known with the first token."""
        return replace(self.perf_metrics(), last_token_time_ns=0)


def sequences_of(
    item: Submission,
    keys: Iterable[int],
    rule: EndRule,
    token_rules: TokenRules,
) -> list[Sequence]:
    """Sequences of an item under `keys`; the first computes the prompt for all."""
    sequences: list[Sequence] = []
    root = root_hash(item.config.kv_cache.salt)
    # The table as it came is not kept for as long as they live.
    config = replace(item.config, prompt_tuning=None)
    for index, key in enumerate(keys):
        sequence = Sequence(
            key=key,
            config=config,
            batch_index=item.batch_index,
            sequence_index=item.sequence_index + index,
            tokens=list(item.token_ids),
            submitted_tokens=len(item.token_ids),
            rule=rule,
            token_rules=token_rules,
            request_id=item.request_id,
            deadline=item.deadline,
            leader=sequences[0] if sequences else None,
            root=root,
        )
        sequences.append(sequence)
    return sequences
