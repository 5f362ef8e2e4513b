"""Decode steps as captured graphs, each for some number of rows. A graph holds the forward of the model over static
inputs and the choice of the tokens. A step with fewer rows than the graph fills up with rows without a store.
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
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import choose_tokens, known_tokens
from trtmesh.engine.backends.torch.cuda.ruled_choice import RuledChoice
from trtmesh.engine.backends.torch.cuda.ruled_rows import Numbers
from trtmesh.engine.backends.torch.cuda.step_inputs import GraphAttention, StepInputs
from trtmesh.engine.backends.torch.cuda.updates import AdaptedSteps
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.sampling.filters import indexes
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
FURTHER = 128
"""Distance of sizes beyond."""

Rules = Callable[[int, Tensor], RuledChoice]
"""Makes the choice by rules for up to a number of rows, with the tokens of the graphs."""


class DecodeGraphs:
    """Computes completing chunks of a token each."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        inputs: StepInputs,
        most_rows: int,
        record: Record,
        rules: Rules | None = None,
        share: Callable[[Tensor], None] | None = None,
        adapted: AdaptedSteps | None = None,
    ) -> None:
        """`share` gives other ranks the tokens chosen by the first; None on a single device. `rules` makes the choice
        by rules; None where the host makes it. `adapted` is None where no graph takes adapters."""
        self._share = share
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._tokens = torch.zeros_like(inputs.positions[:most_rows])
        self._sizes = sizes(most_rows)
        self._launched: tuple[int, Tensor]
        self._replays = capture(model, record, self._step, self._sizes, "decode steps", "sequences")
        self._ruled = rules(most_rows, self._tokens) if rules and self._replays else None
        if self._ruled:
            for size, replay in self._replays.items():
                self._ruled.capture(size, replay())
        self._adapted = adapted
        self._adapted_replays = {}
        if adapted:
            self._adapted_replays = adapted.capture(
                model, record, self._step, self._replays, "decode steps", "sequences"
            )

    @property
    def are_captured(self) -> bool:
        return bool(self._replays)

    @property
    def are_shared(self) -> bool:
        """Whether other ranks compute as well, which know tokens by the rows of the graphs alone."""
        return self._share is not None

    @property
    def take_adapters(self) -> bool:
        return bool(self._adapted_replays)

    def takes(self, chunk: Chunk) -> bool:
        """Whether a graph can compute a chunk."""
        return (
            self.are_captured
            and chunk.count == 1
            and chunk.completes
            and needs_only_tokens(chunk, adapted=self.take_adapters)
        )

    def launch(self, chunks: SequenceOf[Chunk]) -> Rows:
        size = self._size(len(chunks))
        self._inputs.fill(chunks, size, [chunk.sequence.tokens[chunk.start] for chunk in chunks])
        return self._replay(size, chunks)

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
        return Rows(logits, tokens, joined([rows, more] if rows else [more]))

    def choose_guided(
        self, rows: SequenceOf[int], sequences: SequenceOf[Sequence]
    ) -> Tensor | None:
        """Chooses guided rows of the last launch, whose tokens before are known by now. Returns the log-probabilities,
        as `RuledChoice.launch` does."""
        assert self._ruled
        self._ruled.fill_guided(rows, sequences)
        return self._ruled.launch(*self._launched)

    def take(self, rows: SequenceOf[int], tokens: Tensor) -> bool:
        """Takes tokens of the last launch that were chosen otherwise. Returns whether `follow` finds them."""
        if self.are_shared or not self.are_captured:
            return False
        self._tokens.index_copy_(0, indexes(rows, tokens), tokens)
        return True

    @torch.inference_mode()
    def follow(self, chunks: SequenceOf[Chunk], rows: SequenceOf[int]) -> Rows:
        """Launches the step of the tokens chosen in `rows` by the last launch."""
        size = self._size(len(chunks))
        # Known to the device alone; as many of each sequence.
        unknown = chunks[0].start + 1 - len(chunks[0].sequence.tokens)
        self._inputs.fill_chosen(chunks, size, rows, unknown)
        return self._replay(size, chunks, unknown)

    def _size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]

    def _replay(self, size: int, chunks: SequenceOf[Chunk], unknown: int | Numbers = 0) -> Rows:
        count, log_probs = len(chunks), None
        if self._ruled:
            self._ruled.fill([chunk.sequence for chunk in chunks], unknown)
        replays = self._replays
        if self._adapted and has_adapter(chunks):
            self._adapted.fill(chunks)
            replays = self._adapted_replays
        logits = replays[size]()
        self._launched = size, logits
        if self._ruled:
            log_probs = self._ruled.launch(size, logits)
        return Rows(
            logits[:count], self._tokens[:count], None if log_probs is None else log_probs[:count]
        )

    def _step(self, rows: int) -> Tensor:
        inputs = self._inputs
        self._attention.begin_rows(inputs, rows)
        token_ids = known_tokens(inputs.token_ids[:rows], self._tokens)
        logits = self._model.computed_logits(token_ids, inputs.positions[:rows], None)
        choose_tokens(
            logits,
            inputs.places[:rows],
            inputs.temperatures[:rows],
            self._tokens[:rows],
        )
        if self._share:
            self._share(self._tokens[:rows])
        return logits


def sizes(most: int) -> list[int]:
    """Numbers of rows with a graph, for steps of up to `most` rows."""
    smaller = [*SIZES, *range(SIZES[-1] + FURTHER, most, FURTHER)]
    return [*(size for size in smaller if size < most), most]
