"""Decode steps as captured graphs, each for some number of rows. A graph holds the forward of the model over static
inputs and the choice of the tokens. A step with fewer rows than the graph fills up with rows without a store.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.capturing import Record, Rows, capture, needs_only_tokens
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import choose_tokens, known_tokens
from trtmesh.engine.backends.torch.cuda.step_inputs import GraphAttention, StepInputs
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.sequence import Chunk

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
FURTHER = 128
"""Distance of sizes beyond."""


class DecodeGraphs:
    """Computes completing chunks of a token each."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        inputs: StepInputs,
        most_rows: int,
        record: Record,
        share: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`share` gives other ranks the tokens chosen by the first; None on a single device."""
        self._share = share
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._tokens = torch.zeros_like(inputs.positions[:most_rows])
        self._sizes = sizes(most_rows)
        self._replays = capture(model, record, self._step, self._sizes, "decode steps", "sequences")

    @property
    def are_captured(self) -> bool:
        return bool(self._replays)

    def takes(self, chunk: Chunk) -> bool:
        """Whether a graph can compute a chunk."""
        return (
            self.are_captured and chunk.count == 1 and chunk.completes and needs_only_tokens(chunk)
        )

    def launch(self, chunks: SequenceOf[Chunk]) -> Rows:
        size = self._size(len(chunks))
        self._inputs.fill(chunks, size)
        return self._replay(size, len(chunks))

    @torch.inference_mode()
    def with_more(self, rows: Rows | None, more: Rows) -> Rows:
        """The rows of the last launch, None without any, and more rows of the same step, as a launch for `follow`."""
        if rows and not len(more.tokens):
            return rows
        if rows is None:
            tokens, logits = self._tokens[: len(more.tokens)], more.logits
        else:
            tokens = self._tokens[: len(rows.tokens) + len(more.tokens)]
            logits = torch.cat((rows.logits.float(), more.logits))
        tokens[len(tokens) - len(more.tokens) :].copy_(more.tokens)
        return Rows(logits, tokens)

    @torch.inference_mode()
    def follow(self, chunks: SequenceOf[Chunk], rows: SequenceOf[int]) -> Rows:
        """Launches the step of the tokens chosen in `rows` by the last launch."""
        size = self._size(len(chunks))
        self._inputs.fill_chosen(chunks, size, rows)
        return self._replay(size, len(chunks))

    def _size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]

    def _replay(self, size: int, count: int) -> Rows:
        logits = self._replays[size]()
        return Rows(logits[:count], self._tokens[:count])

    def _step(self, rows: int) -> Tensor:
        inputs = self._inputs
        self._attention.begin_rows(inputs, rows)
        token_ids = known_tokens(inputs.token_ids[:rows], self._tokens)
        logits = self._model.computed_logits(token_ids, inputs.positions[:rows], None)
        choose_tokens(
            logits,
            inputs.places[:rows],
            inputs.temperatures[:rows],
            inputs.lowest[:rows],
            self._tokens[:rows],
        )
        if self._share:
            self._share(self._tokens[:rows])
        return logits


def sizes(most: int) -> list[int]:
    """Numbers of rows with a graph, for steps of up to `most` rows."""
    smaller = [*SIZES, *range(SIZES[-1] + FURTHER, most, FURTHER)]
    return [*(size for size in smaller if size < most), most]
