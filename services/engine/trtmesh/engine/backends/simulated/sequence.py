"""One sequence of a simulated backend."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from trtmesh.chassis.block_hashes import chain, root_hash
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.engine.backend import PerfMetrics, SequenceEnd, SequenceStart, Submission
from trtmesh.engine.backends.simulated.endings import Ending, EndRule
from trtmesh.engine.backends.simulated.tokens import CHUNK, TokenSource, stream_key


class Sequence:
    """The tokens of one sequence, made in runs, and what it holds of the block pool.

    A run is a stretch of tokens known in advance: up to the end of a chunk, or to the sequence's end.
    """

    def __init__(
        self,
        item: Submission,
        index: int,
        rule: EndRule,
        source: TokenSource,
        tokens_per_block: int,
    ) -> None:
        emitted = item.emitted_tokens
        self.key = item.keys[index]
        self.priority = item.config.priority
        self.prompt_tokens = len(item.token_ids) - emitted
        self.context = list(item.token_ids)
        self.emitted_tokens = emitted
        self.rule = rule
        self.fails = False
        self.ended = False
        self.ending: Ending | None = None
        self._source = source
        self._stream = stream_key(
            self.context[: self.prompt_tokens],
            item.config.sampling,
            item.batch_index,
            item.sequence_index + index,
        )
        self._generated: list[int] = self.context[self.prompt_tokens :]
        # Blocks.
        self.reuse = item.config.kv_cache.reuse
        self.root = root_hash(item.config.kv_cache.salt)
        self.tokens_per_block = tokens_per_block
        self.hashes = chain(self.root, self.context, tokens_per_block) if self.reuse else []
        self.shared: list[int] = []
        self.private_blocks = 0
        self.reused_blocks = 0
        # Progress.
        self.slot = -1
        self.first_step = 0
        self.prefill_left = len(self.context)
        # Times; counted from when the item was taken.
        self.wants_metrics = item.config.output.perf_metrics
        self.arrival_ns = time.time_ns()
        self.scheduled_ns = 0
        self.first_token_ns = 0

    @property
    def blocks_at_most(self) -> int:
        """Blocks that the sequence needs in the end."""
        longest = self.prompt_tokens + self.rule.max_tokens
        return -(-longest // self.tokens_per_block)

    @property
    def reusable_hashes(self) -> list[int]:
        """Hashes of the blocks that may be reused; the last token is always computed, for its logits."""
        return self.hashes[: (len(self.context) - 1) // self.tokens_per_block]

    @property
    def cached_prompt_tokens(self) -> int:
        return min(self.reused_blocks * self.tokens_per_block, self.prompt_tokens)

    def next_run(self) -> list[int]:
        """The tokens that come next, at least one; sets `ending` when the sequence ends with the last of them."""
        position = len(self._generated)
        # Shifted by a phase of the stream's own, so that streams that start together do not all need their next
        # chunk in the same step.
        index, start = divmod(position + self._stream[0] % CHUNK, CHUNK)
        tokens = self._source.chunk(self._stream, index)[start:]
        other = self._source.other_than(self.rule.end_ids)
        tokens = self.rule.without_early_ends(position, tokens, other)
        self.ending = self.rule.find(self._generated, tokens)
        if self.ending:
            tokens = tokens[: self.ending.tokens - position]
        self._generated += tokens
        return tokens

    def all_tokens(self, generated: int) -> list[int]:
        """The prompt and the first `generated` tokens."""
        return self.context[: self.prompt_tokens] + self._generated[:generated]

    def end(
        self,
        reason: int,
        generated: int,
        stop_token_ids: SequenceOf[int] = (),
        error: TrtmeshError | None = None,
    ) -> SequenceEnd:
        """The end as it is delivered."""
        queued_ns = (self.scheduled_ns or time.time_ns()) - self.arrival_ns
        return SequenceEnd(
            key=self.key,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generated_tokens=generated,
            stop_token_ids=tuple(stop_token_ids),
            error=error,
            perf_metrics=self._perf_metrics() if self.wants_metrics else None,
            queue_seconds=max(0, queued_ns) / 1e9,
        )

    def start(self) -> SequenceStart:
        """What is known with the first token."""
        return SequenceStart(self.key, replace(self._perf_metrics(), last_token_time_ns=0))

    def _perf_metrics(self) -> PerfMetrics:
        allocated = self.private_blocks + len(self.shared) - self.reused_blocks
        return PerfMetrics(
            arrival_time_ns=self.arrival_ns,
            first_scheduled_time_ns=self.scheduled_ns,
            first_token_time_ns=self.first_token_ns,
            last_token_time_ns=time.time_ns() if self.first_token_ns else 0,
            kv_cache_alloc_new_blocks=allocated,
            kv_cache_reused_blocks=self.reused_blocks,
            kv_cache_alloc_total_blocks=allocated,
        )
