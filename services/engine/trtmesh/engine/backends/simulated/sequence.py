"""One sequence of a simulated backend."""

from __future__ import annotations

from trtmesh.chassis.block_hashes import root_hash
from trtmesh.engine.adapter_store import StoredAdapter
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.simulated.tokens import CHUNK, TokenSource, stream_key
from trtmesh.engine.kv_blocks import extend_names
from trtmesh.engine.scheduling.adapter_slots import Order
from trtmesh.engine.stopping import End, EndRule
from trtmesh.engine.times import SequenceTimes


class Sequence:
    """The tokens of one sequence, generated in runs, and its blocks.

    A run is generated in advance: to the end of a chunk or of the sequence.
    """

    def __init__(
        self,
        item: Submission,
        index: int,
        rule: EndRule,
        source: TokenSource,
        tokens_per_block: int,
        adapter: StoredAdapter | None = None,
    ) -> None:
        self.adapter = adapter
        identity = adapter.identity if adapter else None
        self.key = item.keys[index]
        self.priority = item.config.priority
        self.emitted_tokens = item.emitted_tokens
        self.submitted_tokens = len(item.token_ids)
        self.tokens = list(item.token_ids)
        """Prompt and generated tokens, up to the end of the last run."""
        self.rule = rule
        self.fails = False
        self.ended = False
        self.ending: End | None = None
        """How the sequence ends with the last run."""
        self._source = source
        self._stream = stream_key(
            self.tokens[: rule.prompt_tokens],
            item.config.sampling,
            item.batch_index,
            item.sequence_index + index,
            identity,
        )
        # Blocks.
        self.reuse = item.config.kv_cache.reuse
        self.root = root_hash(item.config.kv_cache.salt, adapter=identity)
        self.tokens_per_block = tokens_per_block
        self.hashes: list[int] = []
        """Names of its leading full blocks, computed on demand."""
        self.shared_blocks = 0
        """Leading blocks available for reuse."""
        self.private: list[int] = []
        """Numbers of the blocks after these."""
        self.cached_tokens = 0
        """Tokens with KV before the sequence started."""
        # Handoff.
        self.sender_lease_id = item.sender_lease_id
        self.receiver_lease_id = item.receiver_lease_id
        self.is_pulled = bool(item.handoff_state)
        """Whether its library pulls the KV of all its tokens but the last, before it starts."""
        self.followers: list[Sequence] = []
        """Sequences of its item that start or end with it, while it awaits KV or computes it for a handoff."""
        self.is_prefill = item.is_prefill
        self.is_single = len(item.keys) == 1
        self.waits = False
        """Whether the sequence waits for KV, not for a step."""
        self.adopted = False
        """Whether it has blocks with KV, before its start."""
        # Progress.
        self.order: Order = ()
        """Place in the queue."""
        self.slot = -1
        self.first_step = 0
        self.prefill_left = len(self.tokens)
        self.wants_metrics = item.config.output.perf_metrics
        self.times = SequenceTimes()

    @property
    def handoff_tokens(self) -> int:
        """Tokens with KV at its handoff: several sequences leave before the first token, one after it."""
        return self.submitted_tokens if self.is_single else self.submitted_tokens - 1

    def names(self, tokens: int) -> list[int]:
        """Names of the full blocks of its first `tokens` tokens; none without reuse."""
        if not self.reuse:
            return []
        count = tokens // self.tokens_per_block
        extend_names(self.hashes, self.root, self.tokens, self.tokens_per_block, count)
        return self.hashes[:count]

    def next_run(self) -> list[int]:
        """Generates at least one token; sets `ending` if the last token ends the sequence."""
        length = len(self.tokens)
        # Each stream has a phase, so that streams started together need chunks in different steps.
        position = length - self.rule.prompt_tokens + self._stream[0] % CHUNK
        index, start = divmod(position, CHUNK)
        self.tokens += self._allowed(self._source.chunk(self._stream, index)[start:])
        end = self.rule.first_end(self.tokens, length)
        if end:
            del self.tokens[end[0] :]
            self.ending = end[1]
        return self.tokens[length:]

    def _allowed(self, run: list[int]) -> list[int]:
        """Replaces the end ids banned by min_tokens."""
        rule, length = self.rule, len(self.tokens)
        if not rule.bans_end_ids(length) or rule.end_ids.isdisjoint(run):
            return run
        other = self._source.other_than(rule.end_ids)
        return [
            other if token in rule.end_ids and rule.bans_end_ids(at) else token
            for at, token in enumerate(run, length)
        ]
