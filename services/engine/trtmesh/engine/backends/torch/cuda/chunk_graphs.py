"""Chunks of prompts as captured graphs, each for some number of tokens.

Operation by operation, the host's starts of kernels decide the time of a short prompt. A graph has the forward of the
model over static inputs, and the choice of tokens; the rest of a graph is filled with tokens without a store.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.capturing import (
    Rows,
    joined,
    needs_only_tokens,
)
from trtmesh.engine.backends.torch.cuda.decode_graphs import Graphs
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import choose_tokens
from trtmesh.engine.backends.torch.cuda.ruled_choice import RuledChoice
from trtmesh.engine.backends.torch.cuda.step_inputs import MOST_CHUNKS, ChunkInputs
from trtmesh.engine.backends.torch.sequence import Chunk
from trtmesh.engine.scheduling import sequence as scheduled

SIZES = (64, 128, 256, *range(384, 2049, 128))
"""Tokens of a graph. More take several graphs, since larger graphs would not be faster."""


class ChunkGraphs(Graphs[ChunkInputs]):
    """Computes chunks of any number and size, as many as possible in each graph."""

    what, unit = "chunks of prompts", "tokens"

    def _sizes_for(self, most: int) -> list[int]:
        return sizes(most)

    def _no_tokens(self) -> Tensor:
        return torch.zeros_like(self._inputs.kept_rows)

    def _capture_rules(self, ruled: RuledChoice) -> None:
        # Of a graph of any size.
        most, device = len(self._tokens), self._tokens.device
        self._kept = torch.zeros(most, self._model.vocabulary_size, device=device)
        ruled.capture(most, self._kept)

    def takes(self, chunks: SequenceOf[Chunk]) -> bool:
        adapted = self.take_adapters
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
        size = self._size(count)
        found = self._inputs.fill(chunks, size)
        kept = found.sequences
        if self._ruled:
            self._ruled.fill(found)
        logits = self._compute(size, chunks)[: len(kept)].clone()
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
