"""Short chunks of prompts as captured graphs, one for each of some numbers of tokens.

Operation by operation, a short prompt costs the time in which the host starts kernels. A graph has the forward of the
model over static inputs; what a batch leaves over is filled up with tokens that store nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.capturing import Record, capture, needs_only_tokens
from trtmesh.engine.backends.torch.cuda.chunk_inputs import MOST_CHUNKS, ChunkInputs
from trtmesh.engine.backends.torch.cuda.graph_attention import GraphAttention
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.scheduling.sequence import Chunk

SIZES = (64, 128, 256, *range(384, 2049, 128))
"""Tokens of a graph. Beyond, the device takes longer than the host, and what fills up would cost more than it saves."""


class ChunkGraphs:
    """Computes few chunks with few tokens."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        inputs: ChunkInputs,
        most_tokens: int,
        record: Record,
    ) -> None:
        """`most_tokens` are those of the largest step, beyond which no graph is useful."""
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._sizes = sizes(most_tokens)
        self._replays = capture(
            model, record, self._step, self._sizes, "chunks of prompts", "tokens"
        )

    def takes(self, chunks: SequenceOf[Chunk]) -> bool:
        """Whether a graph can compute chunks together."""
        return (
            bool(self._replays)
            and len(chunks) <= MOST_CHUNKS
            and sum(chunk.count for chunk in chunks) <= self._sizes[-1]
            and all(needs_only_tokens(chunk) for chunk in chunks)
        )

    @torch.inference_mode()
    def launch(self, chunks: SequenceOf[Chunk]) -> Tensor:
        """The logits of the completing chunks [completing, vocabulary]."""
        count = sum(chunk.count for chunk in chunks)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._inputs.fill(chunks, size)
        completing = sum(chunk.completes for chunk in chunks)
        return self._replays[size]()[:completing].clone()

    def _step(self, size: int) -> Tensor:
        inputs = self._inputs
        self._attention.begin_chunks(inputs, size)
        return self._model.logits(
            inputs.token_ids[:size], inputs.positions[:size], inputs.kept_rows
        )


def sizes(most_tokens: int) -> list[int]:
    """Numbers of tokens with a graph, for steps of up to `most_tokens`."""
    most = min(most_tokens, SIZES[-1])
    return [*(size for size in SIZES if size < most), most]
