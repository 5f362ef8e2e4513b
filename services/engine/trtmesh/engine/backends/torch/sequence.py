"""A sequence of the torch backend, with the data for scheduler, layers and choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trtmesh.chassis.block_hashes import root_hash
from trtmesh.chassis.stopping import EndRule
from trtmesh.engine.backend import SequenceStart, StepOutput, Submission, TokenDetails
from trtmesh.engine.backends.torch.guided.grammars import Grammar
from trtmesh.engine.backends.torch.sampling.continuation import Continuation, GivenDrafts
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.scheduling import sequence as scheduled
from trtmesh.engine.scheduling.leases import Outgoing
from trtmesh.engine.scheduling.sequence import ScheduledSequence

if TYPE_CHECKING:
    from trtmesh.engine.backends.torch.memory.adapters import LoadedAdapter
    from trtmesh.engine.backends.torch.model.prompt_tables import PromptTable
    from trtmesh.engine.backends.torch.preparation import PartLease
    from trtmesh.engine.backends.torch.sampling.readers import Reader


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(ScheduledSequence, Continuation):
    """A continuation with KV."""

    request_id: str = ""
    """Request id in log lines."""
    prompt_table: PromptTable | None = None
    """The embeddings of ids beyond the vocabulary in the prompt."""
    unprepared: int = 0
    """Parts of the item still being made."""
    leases: list[PartLease] = field(default_factory=list)
    """The sizes of the parts, from before they are made."""
    adapter: LoadedAdapter | None = None
    reader: Reader | None = None
    """Still needs logits of submitted tokens."""

    @property
    def is_prepared(self) -> bool:
        return not self.unprepared

    def await_part(self, lease: PartLease) -> None:
        self.leases.append(lease)
        self.unprepared += 1

    def give_part(self, part: PromptTable | Grammar | GivenDrafts) -> None:
        """Takes an awaited part."""
        self.unprepared -= 1
        if isinstance(part, Grammar):
            self.grammar = part
        elif isinstance(part, GivenDrafts):
            self.given_drafts = part
        else:
            self.prompt_table = part
            self._name_root()

    def give_adapter(self, adapter: LoadedAdapter) -> None:
        """Takes the adapter and a hold."""
        self.adapter = adapter
        self._name_root()

    def _name_root(self) -> None:
        self.root = root_hash(
            self.config.kv_cache.salt,
            adapter=self.adapter.identity if self.adapter else None,
            prompt_table_digest=self.prompt_table.digest if self.prompt_table else None,
        )

    def let_go(self) -> None:
        self.prompt_table = self.reader = self.history = self.grammar = None
        self.given_drafts = None
        while self.leases:
            self.leases.pop().give_back()
        if self.adapter:
            self.adapter.give_back(self.adapter)
            self.adapter = None

    @property
    def most_reusable(self) -> int:
        last = len(self.tokens) - 1
        return last if self.reader is None else min(self.reader.next, last)

    def tell_next(
        self, token: int, details: TokenDetails | None, output: StepOutput, now_ns: int
    ) -> None:
        """Appends a generated token, and reports the token with details in the output of a step."""
        output.keys.append(self.key)
        output.token_offsets.append(len(self.tokens) - self.rule.prompt_tokens)
        output.token_counts.append(1)
        output.token_ids.append(token)
        if self.append(token, now_ns) and self.config.output.perf_metrics:
            output.starts.append(SequenceStart(self.key, self.times.metrics_at_start()))
        if details:
            details.cumulative_log_prob = self.add_log_probs(
                details.model_log_probs or details.log_probs
            )
            output.details.append(details)


Chunk = scheduled.Chunk[Sequence]


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
    # Table and logits as received need not live as long as they do.
    draft = item.config.draft and replace(item.config.draft, logits=None)
    config = replace(item.config, prompt_tuning=None, lora=None, draft=draft)
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
