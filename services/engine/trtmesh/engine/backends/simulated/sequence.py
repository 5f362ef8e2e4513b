"""One sequence of a simulated backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trtmesh.chassis.block_hashes import root_hash
from trtmesh.chassis.stopping import End, EndRule
from trtmesh.engine.adapter_store import StoredAdapter
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.simulated.tokens import CHUNK, TokenSource, stream_key
from trtmesh.engine.scheduling.leases import Outgoing
from trtmesh.engine.scheduling.sequence import ScheduledSequence

if TYPE_CHECKING:
    # Needs numpy, which a simulation does without.
    from trtmesh.engine.backends.simulated.kv_content import States

PULLED = "pulled"
"""In place of the lease of a sequence whose KV the library pulls."""


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedSequence(ScheduledSequence):
    """A sequence whose tokens are made in runs: to the end of a chunk or of the sequence.

    While it generates, `tokens` lacks those of the run under way.
    """

    keys: list[int]
    """Its own; of a prompt that is handed over for several sequences, the keys of all."""
    stream: bytes
    is_single: bool
    """Whether it is the only sequence of its item."""
    run: list[int] = field(default_factory=list)
    ending: End | None = None
    """How the sequence ends with the run."""
    place: int = -1
    """In the batch of generating sequences; -1 outside."""
    first_step: int = 0
    """The (virtual) step of its first generated token."""
    fails: bool = False
    is_pulled: bool = False
    """Whether its library pulls the KV of all its tokens but the last, before it starts."""
    states: States | None = None
    """Of the tokens that are handed over."""

    def make_run(self, source: TokenSource) -> None:
        """Makes at least one token; sets `ending` if the last token ends the sequence."""
        tokens, length = self.tokens, len(self.tokens)
        # Each stream has a phase, so that streams started together need chunks in different steps.
        position = self.generated_tokens + self.stream[0] % CHUNK
        index, start = divmod(position, CHUNK)
        tokens += self._allowed(source.chunk(self.stream, index)[start:], source)
        end = self.rule.first_end(tokens, length)
        self.run = tokens[length : end[0] if end else None]
        self.ending = end[1] if end else None
        del tokens[length:]

    def take_run(self, generated: int) -> None:
        """Adds the tokens of the run up to `generated` tokens in all, and drops the others."""
        self.tokens += self.run[: generated - self.generated_tokens]
        self.run = []

    def let_go(self) -> None:
        self.states = None

    def _allowed(self, run: list[int], source: TokenSource) -> list[int]:
        """Replaces the end ids banned by min_tokens."""
        rule, length = self.rule, len(self.tokens)
        if not rule.bans_end_ids(length) or rule.end_ids.isdisjoint(run):
            return run
        other = source.other_than(rule.end_ids)
        return [
            other if token in rule.end_ids and rule.bans_end_ids(at) else token
            for at, token in enumerate(run, length)
        ]


def sequences_of(
    item: Submission, rule: EndRule, adapter: StoredAdapter | None
) -> list[SimulatedSequence]:
    """The sequences of an item; the first computes the prompt for all, or alone where it is handed over for them."""
    sequences: list[SimulatedSequence] = []
    identity = adapter.identity if adapter else None
    is_single, lease, is_pulled = (
        len(item.keys) == 1,
        item.sender_lease_id,
        bool(item.handoff_state),
    )
    handed_over = len(item.token_ids) - (not is_single)
    for index, key in enumerate(item.keys[:1] if lease else item.keys):
        sequence = SimulatedSequence(
            key=key,
            keys=list(item.keys) if lease else [key],
            tokens=list(item.token_ids),
            rule=rule,
            config=item.config,
            submitted_tokens=len(item.token_ids),
            leader=sequences[0] if sequences else None,
            adapter=adapter,
            root=root_hash(item.config.kv_cache.salt, adapter=identity),
            outgoing=Outgoing(lease, handed_over) if lease else None,
            receiver_lease=PULLED if is_pulled else item.receiver_lease_id,
            is_prefill=item.is_prefill,
            stream=stream_key(
                item.token_ids[: rule.prompt_tokens],
                item.config.sampling,
                item.batch_index,
                item.sequence_index + index,
                identity,
            ),
            is_single=is_single,
            is_pulled=is_pulled,
        )
        sequences.append(sequence)
    return sequences
