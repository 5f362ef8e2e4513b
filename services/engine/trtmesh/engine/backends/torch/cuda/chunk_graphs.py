"""Chunks of prompts as captured graphs, each for some number of tokens.

Operation by operation, the host's starts of kernels decide the time of a short prompt. A graph has the forward of the
model over static inputs, and the choice of tokens; the rest of a graph is filled with tokens without a store.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.capturing import (
    Record,
    Rows,
    capture,
    has_adapter,
    joined,
    needs_only_tokens,
)
from trtmesh.engine.backends.torch.cuda.decode_graphs import Rules
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import choose_tokens
from trtmesh.engine.backends.torch.cuda.step_inputs import MOST_CHUNKS, ChunkInputs, GraphAttention
from trtmesh.engine.backends.torch.cuda.updates import AdaptedSteps
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.sequence import Chunk
from trtmesh.engine.scheduling import sequence as scheduled

SIZES = (64, 128, 256, *range(384, 2049, 128))
"""Tokens of a graph. More take several graphs, since larger graphs would not be faster."""


class ChunkGraphs:
    """Computes chunks of any number and size, as many as possible in each graph."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        inputs: ChunkInputs,
        most_tokens: int,
        record: Record,
        rules: Rules | None = None,
        share: Callable[[Tensor], None] | None = None,
        adapted: AdaptedSteps | None = None,
    ) -> None:
        """`most_tokens` is the largest step: no larger graph is useful. For the others see DecodeGraphs."""
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._share = share
        self._tokens = torch.zeros_like(inputs.kept_rows)
        self._sizes = sizes(most_tokens)
        self._replays = capture(
            model, record, self._step, self._sizes, "chunks of prompts", "tokens"
        )
        self._ruled = rules(MOST_CHUNKS, self._tokens) if rules and self._replays else None
        if self._ruled:
            # Of a graph of any size.
            self._kept = torch.zeros(MOST_CHUNKS, model.vocabulary_size, device=self._tokens.device)
            self._ruled.capture(MOST_CHUNKS, self._kept)
        self._adapted = adapted
        self._adapted_replays = {}
        if adapted:
            self._adapted_replays = adapted.capture(
                model, record, self._step, self._replays, "chunks of prompts", "tokens"
            )

    @property
    def are_captured(self) -> bool:
        return bool(self._replays)

    def takes(self, chunks: SequenceOf[Chunk]) -> bool:
        """Whether graphs can compute chunks."""
        adapted = bool(self._adapted_replays)
        return self.are_captured and all(
            needs_only_tokens(chunk, adapted=adapted) and not chunk.drafts for chunk in chunks
        )

    def launch(self, chunks: SequenceOf[Chunk]) -> Rows:
        """The rows of the completing chunks, in order; the logits are float32."""
        parts = [self._launch(part) for part in parts_of(chunks, self._sizes[-1])]
        if len(parts) == 1:
            return parts[0]
        return Rows(
            torch.cat([part.logits for part in parts]),
            torch.cat([part.tokens for part in parts]),
            joined(parts),
        )

    @torch.inference_mode()
    def _launch(self, chunks: SequenceOf[Chunk]) -> Rows:
        count = sum(chunk.count for chunk in chunks)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._inputs.fill(chunks, size)
        kept = [chunk.sequence for chunk in chunks if chunk.completes]
        if self._ruled:
            self._ruled.fill(kept)
        replays = self._replays
        if self._adapted and has_adapter(chunks):
            self._adapted.fill(chunks)
            replays = self._adapted_replays
        logits = replays[size]()[: len(kept)].clone()
        log_probs = None
        if self._ruled and kept:
            self._kept[: len(kept)].copy_(logits)
            log_probs = self._ruled.launch(MOST_CHUNKS, self._kept)
        return Rows(
            logits,
            self._tokens[: len(kept)].clone(),
            None if log_probs is None else log_probs[: len(kept)].clone(),
        )

    def _step(self, size: int) -> Tensor:
        inputs = self._inputs
        self._attention.begin_chunks(inputs, size)
        logits = self._model.logits(
            inputs.token_ids[:size], inputs.positions[:size], inputs.kept_rows
        )
        choose_tokens(logits, inputs.places, inputs.temperatures, self._tokens)
        if self._share:
            self._share(self._tokens)
        return logits


def parts_of(chunks: SequenceOf[Chunk], most_tokens: int) -> list[list[Chunk]]:
    """The same chunks, divided where a part would have more than MOST_CHUNKS or `most_tokens`."""
    parts: list[list[Chunk]] = [[]]
    left = most_tokens
    for chunk in chunks:
        start, end = chunk.start, chunk.start + chunk.count
        while start < end:
            if not left or len(parts[-1]) == MOST_CHUNKS:
                parts.append([])
                left = most_tokens
            count = min(left, end - start)
            parts[-1].append(scheduled.Chunk(chunk.sequence, start, count))
            start += count
            left -= count
    return parts


def sizes(most_tokens: int) -> list[int]:
    """Numbers of tokens with a graph, for steps of up to `most_tokens`."""
    most = min(most_tokens, SIZES[-1])
    return [*(size for size in SIZES if size < most), most]
