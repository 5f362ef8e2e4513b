"""One sequence: tokens, computed KV, and blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trtmesh.chassis.block_hashes import ROOT_HASH, root_hash
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backend import SequenceEnd, SequenceStart, StepOutput, Submission, TokenDetails
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.scheduling.leases import Outgoing
from trtmesh.engine.stopping import EndRule
from trtmesh.engine.times import SequenceTimes

if TYPE_CHECKING:
    from trtmesh.engine.backends.torch.memory.adapters import LoadedAdapter
    from trtmesh.engine.backends.torch.model.prompt_tables import PromptTable, TableLease
    from trtmesh.engine.backends.torch.sampling.readers import Reader

PRIORITY_STEPS = 256
"""Steps of waiting that one point of priority is worth."""
WHOLE_POINTS = 16
"""Priorities up to this, in either direction, are worth a point each; beyond, each doubling is worth a point. So no
order is lost, and the lowest priority does not starve."""

Rank = tuple[int, int, int]
"""Fixed place in every order: the lowest starts first and is preempted last. The step of arrival less the head start,
then the priority, highest first, then the arrival."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(Continuation):
    """A continuation and its KV. There are no phases: a sequence with fewer computed tokens than tokens has work."""

    config: GenerationConfig
    submitted_tokens: int
    """Tokens received with the item: the prompt, and tokens from another worker."""
    request_id: str = ""
    """Request id in log lines."""
    leader: Sequence | None = None
    """The sequence that computes the shared prompt; this sequence begins with a copy of the KV."""
    prompt_table: PromptTable | None = None
    """The embeddings of ids beyond the vocabulary in the prompt."""
    table_lease: TableLease | None = None
    """Memory of the prompt table, from before the table is read."""
    adapter: LoadedAdapter | None = None
    mates: list[Sequence] = field(default_factory=list)
    """Sequences admitted and paused only together, this one included. They share the list, and leave it at their ends.
    Empty for a sequence on its own."""
    root: int = ROOT_HASH
    """Parent hash of the first block: covers everything besides tokens that changes the KV."""
    num_computed: int = 0
    """Leading tokens with their KV in the blocks."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Hashes of leading full blocks, computed on demand."""
    num_dropped: int = 0
    """Leading blocks that no further token sees; they are released."""
    num_published: int = 0
    """Leading blocks offered for reuse."""
    slot: int = -1
    """Row of the block table; -1 outside the batch."""
    rank: Rank = (0, 0, 0)
    paused: bool = False
    """Whether the sequence has started and lost its blocks."""
    in_flight: bool = False
    """Whether a launched step has yet to deliver a token or logits: the sequence is neither scheduled nor preempted."""
    cached_prompt_tokens: int = 0
    reader: Reader | None = None
    """Still needs logits of submitted tokens."""
    outgoing: Outgoing | None = None
    """The handoff with which the sequence ends after its next token."""
    is_prefill: bool = False
    """Whether a shorter prompt may go before it, and it before a longer one."""
    receiver_lease: str = ""
    """TableLease of the blocks that the sequence waits for; empty once it has them."""
    times: SequenceTimes = field(default_factory=SequenceTimes)

    @property
    def is_ready(self) -> bool:
        """False while the prompt table is being read, or KV of another worker awaited."""
        return self.has_prompt and not self.receiver_lease

    @property
    def has_prompt(self) -> bool:
        """False while the prompt table is being read."""
        return self.table_lease is None or self.prompt_table is not None

    @property
    def is_pinned(self) -> bool:
        """Whether the sequence starts with all blocks up to its handoff, and is not preempted."""
        return self.outgoing is not None and self.outgoing.is_pinned

    def give_table(self, table: PromptTable) -> None:
        """Takes the table of the lease."""
        self.prompt_table = table
        self._name_root()

    def give_adapter(self, adapter: LoadedAdapter) -> None:
        """Takes the adapter and one of its holds."""
        self.adapter = adapter
        self._name_root()

    def _name_root(self) -> None:
        self.root = root_hash(
            self.config.kv_cache.salt,
            adapter=self.adapter.identity if self.adapter else None,
            prompt_table_digest=self.prompt_table.digest if self.prompt_table else None,
        )

    def let_go(self) -> None:
        """Drops large members: some lists keep ended sequences for a while."""
        self.prompt_table = self.reader = self.history = None
        if self.table_lease:
            self.table_lease.give_back()
            self.table_lease = None
        if self.adapter:
            self.adapter.give_back(self.adapter)
            self.adapter = None

    @property
    def head_start(self) -> int:
        """Steps by which the priority advances the rank."""
        priority = self.config.priority
        doublings = math.log2(max(WHOLE_POINTS, abs(priority)) / WHOLE_POINTS)
        points = min(WHOLE_POINTS, abs(priority)) + doublings
        return round(math.copysign(points * PRIORITY_STEPS, priority))

    @property
    def most_reusable(self) -> int:
        """Leading tokens that may reuse KV: their logits are not needed."""
        last = len(self.tokens) - 1
        return last if self.reader is None else min(self.reader.next, last)

    @property
    def pending_prompt_tokens(self) -> int:
        """Submitted tokens without KV, unless it is to come from another worker."""
        return 0 if self.receiver_lease else max(0, self.submitted_tokens - self.num_computed)

    def append(self, token: int, now_ns: int) -> None:
        """Adds a generated token."""
        self.tokens.append(token)
        times = self.times
        times.first_token_ns = times.first_token_ns or now_ns
        times.last_token_ns = now_ns

    def tell_next(
        self, token: int, details: TokenDetails | None, output: StepOutput, now_ns: int
    ) -> None:
        """Appends a generated token, and reports the token and its details in the output of a step."""
        output.keys.append(self.key)
        output.token_offsets.append(self.generated_tokens)
        output.token_counts.append(1)
        output.token_ids.append(token)
        first = not self.times.first_token_ns
        self.append(token, now_ns)
        if first and self.config.output.perf_metrics:
            output.starts.append(SequenceStart(self.key, self.times.metrics_at_start()))
        if details:
            details.cumulative_log_prob = self.add_log_probs(
                details.model_log_probs or details.log_probs
            )
            output.details.append(details)

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


Pairs = SequenceOf[tuple[Sequence, Sequence]]
"""Sequences, and those whose KV they continue from."""


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether the next token can be chosen afterwards."""
        return self.start + self.count == len(self.sequence.tokens)


def is_shared(item: Submission) -> bool:
    """Whether several sequences or beams continue from the prompt of the item."""
    return len(item.keys) > 1 or item.config.beam_search.beam_width > 1


def sequences_of(
    item: Submission, keys: Iterable[int], rule: EndRule, token_rules: TokenRules
) -> list[Sequence]:
    """The sequences of an item, named `keys`; the first computes the prompt for all."""
    sequences: list[Sequence] = []
    root = root_hash(item.config.kv_cache.salt)
    sent = len(item.token_ids) - is_shared(item)
    # The table as received need not live as long as they do.
    config = replace(item.config, prompt_tuning=None, lora=None)
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
            leader=sequences[0] if sequences else None,
            root=root,
            outgoing=Outgoing(item.sender_lease_id, sent) if item.sender_lease_id else None,
            receiver_lease=item.receiver_lease_id,
            is_prefill=item.is_prefill,
        )
        sequences.append(sequence)
    return sequences
