"""Drafts by a smaller model with the same tokenizer.

The small model follows each sequence in separate KV blocks, and draws with the noise of the sequence. So both models
often pick the same largest logit / temperature + noise, more often than with independent noise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from dataclasses import replace

import torch
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling
from trtmesh.engine.backends.torch.compute.device import Compute
from trtmesh.engine.backends.torch.drafts.drafter import Wish
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables
from trtmesh.engine.backends.torch.sampling.choice import TokenChoice
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence

FEW_TOKENS = 16
"""A sequence further behind gets no drafts while the small model catches up."""
TOKENS_AT_ONCE = 512
"""Most tokens of a sequence computed to catch up in a step."""


class DraftModel:
    """Implements Drafter."""

    is_free = False
    seconds_apart = 0.0

    def __init__(
        self,
        compute: Compute,
        tables: BlockTables,
        device: torch.device,
        *,
        blocks: int,
        tokens_per_block: int,
        most_tokens: int,
    ) -> None:
        """`compute` is the small model over `blocks` blocks, for sequences of up to `most_tokens`."""
        self._compute = compute
        # Kernels run on the current device of a thread.
        self._device = device if device.type == "cuda" else -1
        self._tables = tables
        self._tokens_per_block = tokens_per_block
        self._most_tokens = most_tokens
        self._free = list(range(blocks, 0, -1))
        # The longest unused first.
        self._shadows: OrderedDict[int, Sequence] = OrderedDict()

    def propose(self, wishes: SequenceOf[Wish]) -> list[SequenceOf[int]]:
        with torch.cuda.device(self._device):
            return self._propose(wishes)

    def _propose(self, wishes: SequenceOf[Wish]) -> list[SequenceOf[int]]:
        wanted = {sequence.key for sequence, _ in wishes}
        going: list[tuple[int, Sequence, int]] = []
        for place, (sequence, most) in enumerate(wishes):
            shadow = self._shadow(sequence)
            if shadow and self._has_room(shadow, len(sequence.tokens) + most, wanted):
                if _lacking(shadow) > FEW_TOKENS:
                    self._catch_up(shadow)
                else:
                    going.append((place, shadow, most))
        lacking = {shadow.key: most for _, shadow, most in going}
        while any(lacking.values()):
            drawn = self._draw([shadow for _, shadow, _ in going if lacking[shadow.key]], lacking)
            lacking = {key: max(0, most - drawn) for key, most in lacking.items()}
        proposals: list[SequenceOf[int]] = [()] * len(wishes)
        for place, shadow, _ in going:
            # `submitted_tokens` counts the tokens of the sequence.
            proposals[place] = shadow.tokens[shadow.submitted_tokens :]
        return proposals

    def forget(self, sequence: Sequence) -> None:
        self._drop(sequence.key)

    def _drop(self, key: int) -> None:
        shadow = self._shadows.pop(key, None)
        if shadow and shadow.slot >= 0:
            self._free += shadow.blocks
            self._tables.give_back(shadow.slot)

    def _shadow(self, sequence: Sequence) -> Sequence | None:
        """The sequence as seen by the small model, with the same tokens; None for a prompt with a prompt table."""
        if sequence.prompt_table:
            return None
        shadow = self._shadows.get(sequence.key)
        if shadow is None:
            shadow = self._shadows[sequence.key] = _shadow_of(sequence)
        self._shadows.move_to_end(sequence.key)
        # Rejected drafts are dropped.
        first = shadow.submitted_tokens
        for guess, token in zip(shadow.tokens[first:], sequence.tokens[first:], strict=False):
            if guess != token:
                break
            first += 1
        del shadow.tokens[first:]
        shadow.tokens += sequence.tokens[first:]
        shadow.submitted_tokens = len(shadow.tokens)
        # The last token may be a computed draft without a verification.
        shadow.num_computed = min(shadow.num_computed, first, len(shadow.tokens) - 1)
        return shadow

    def _has_room(self, shadow: Sequence, tokens: int, wanted: AbstractSet[int]) -> bool:
        """Gives a shadow blocks for so many tokens. Takes blocks from the longest unused shadows, except the
        `wanted`."""
        missing = -(-tokens // self._tokens_per_block) - len(shadow.blocks)
        if tokens > self._most_tokens:
            return False
        while missing > len(self._free) or (shadow.slot < 0 and not self._tables.free_slots):
            unused = next((key for key in self._shadows if key not in wanted), None)
            if unused is None:
                return False
            self._drop(unused)
        if shadow.slot < 0:
            shadow.slot = self._tables.take()
        if missing > 0:
            blocks = [self._free.pop() for _ in range(missing)]
            self._tables.put(shadow.slot, len(shadow.blocks), blocks)
            shadow.blocks += blocks
        return True

    def _catch_up(self, shadow: Sequence) -> None:
        count = min(_lacking(shadow) - 1, TOKENS_AT_ONCE)
        self._compute.forward([Chunk(shadow, shadow.num_computed, count)])
        shadow.num_computed += count

    def _draw(self, shadows: list[Sequence], lacking: Mapping[int, int]) -> int:
        """Adds drafts to each, of at most `lacking` by key. Returns the number: one, or as many as the device computes
        without the host."""
        chunks = [Chunk(each, each.num_computed, _lacking(each)) for each in shadows]
        forward = self._compute.forward(chunks)
        drawn: list[tuple[list[Sequence], TokenChoice]] = []
        while True:
            sequences = [chunk.sequence for chunk in forward.completing]
            drawn.append((sequences, self._compute.choose(sequences, forward.logits)))
            rows = [row for row, each in enumerate(sequences) if lacking[each.key] > len(drawn)]
            if not rows or not self._compute.may_follow:
                break
            going = [sequences[row] for row in rows]
            chunks = [Chunk(each, len(each.tokens) + len(drawn) - 1, 1) for each in going]
            forward = self._compute.follow(chunks, rows)
        for sequences, choice in drawn:
            choice.read()
            for shadow, token in zip(sequences, choice.token_ids, strict=True):
                shadow.num_computed = len(shadow.tokens)
                shadow.tokens.append(token)
        return len(drawn)


def _lacking(shadow: Sequence) -> int:
    return len(shadow.tokens) - shadow.num_computed


def _shadow_of(sequence: Sequence) -> Sequence:
    sampling = sequence.config.sampling
    plain = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )
    # Penalties and bans would need a memory with a way back.
    config = replace(GenerationConfig(), sampling=plain)
    return Sequence(
        key=sequence.key,
        config=config,
        batch_index=sequence.batch_index,
        sequence_index=sequence.sequence_index,
        tokens=list(sequence.tokens),
        submitted_tokens=len(sequence.tokens),
        rule=sequence.rule,
        token_rules=TokenRules(config),
        request_id=sequence.request_id,
    )
