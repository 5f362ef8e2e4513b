"""Decode steps as captured graphs, each for some number of rows. A graph holds the forward of the model over static
inputs and the choice of the tokens. A step with fewer rows than the graph fills up with rows without a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.attention import GraphAttention
from trtmesh.engine.backends.torch.cuda.capturing import (
    Record,
    Rows,
    capture,
    joined,
    needs_only_tokens,
)
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import choose_tokens, known_tokens
from trtmesh.engine.backends.torch.cuda.ruled_choice import RuledChoice
from trtmesh.engine.backends.torch.cuda.ruled_rows import Numbers
from trtmesh.engine.backends.torch.cuda.step_inputs import ChunkInputs, StepInputs
from trtmesh.engine.backends.torch.cuda.updates import AdaptedSteps
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.sampling.filters import indexes
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
FURTHER = 128
"""Distance of sizes beyond."""

Inputs = TypeVar("Inputs", StepInputs, ChunkInputs)

Rules = Callable[[int, Tensor], RuledChoice]
"""Makes the choice by rules for up to a number of rows, with the tokens of the graphs."""


class Graphs(ABC, Generic[Inputs]):
    """Steps as captured graphs of some sizes, each with the choice of the tokens."""

    what: ClassVar[str]
    unit: ClassVar[str]
    """Names of the steps, and of the unit of their sizes."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        inputs: Inputs,
        most: int,
        record: Record,
        rules: Rules | None = None,
        share: Callable[[Tensor], None] | None = None,
        adapted: AdaptedSteps | None = None,
    ) -> None:
        """`most` is the size of the largest step. `share` gives other ranks the tokens chosen by the first; None on a
        single device. `rules` makes the choice by rules; None where the host makes it. `adapted` is None where no graph
        takes adapters."""
        self._share = share
        self._model = model
        self._attention = attention
        self._inputs: Inputs = inputs
        self._sizes = self._sizes_for(most)
        self._tokens = self._no_tokens()
        self._replays = capture(model, record, self._step, self._sizes, self.what, self.unit)
        self._ruled = rules(len(self._tokens), self._tokens) if rules and self._replays else None
        if self._ruled:
            self._capture_rules(self._ruled)
        self._adapted = adapted
        self._adapted_replays = {}
        if adapted:
            self._adapted_replays = adapted.capture(
                model, record, self._step, self._replays, self.what, self.unit
            )

    @property
    def are_captured(self) -> bool:
        return bool(self._replays)

    @property
    def take_adapters(self) -> bool:
        return bool(self._adapted_replays)

    @abstractmethod
    def _sizes_for(self, most: int) -> list[int]:
        """The sizes of the graphs, in ascending order."""

    @abstractmethod
    def _no_tokens(self) -> Tensor:
        """Makes the memory for chosen tokens."""

    @abstractmethod
    def _step(self, size: int) -> Tensor:
        """Computes the logits of a graph, and chooses the tokens."""

    @abstractmethod
    def _capture_rules(self, ruled: RuledChoice) -> None:
        """Captures the choice by rules from the logits of the graphs."""

    def _size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]

    def _compute(self, size: int, chunks: SequenceOf[Chunk]) -> Tensor:
        """The logits of a graph, whose inputs are filled."""
        if self._adapted and any(chunk.sequence.adapter is not None for chunk in chunks):
            self._adapted.fill(chunks)
            return self._adapted_replays[size]()
        return self._replays[size]()


class DecodeGraphs(Graphs[StepInputs]):
    """Computes completing chunks of a token each."""

    what, unit = "decode steps", "sequences"

    _launched: tuple[int, Tensor]
    """Size and logits of the last graph."""

    def _sizes_for(self, most: int) -> list[int]:
        return sizes(most)

    def _no_tokens(self) -> Tensor:
        return torch.zeros_like(self._inputs.positions[: self._sizes[-1]])

    def _capture_rules(self, ruled: RuledChoice) -> None:
        for size, replay in self._replays.items():
            ruled.capture(size, replay())

    @property
    def are_shared(self) -> bool:
        """Whether other ranks compute as well, which know tokens by the rows of the graphs alone."""
        return self._share is not None

    def takes(self, chunk: Chunk) -> bool:
        return (
            self.are_captured
            and chunk.count == 1
            and chunk.completes
            and needs_only_tokens(chunk, adapted=self.take_adapters)
        )

    def launch(self, chunks: SequenceOf[Chunk]) -> Rows:
        size = self._size(len(chunks))
        token_ids = [chunk.sequence.tokens[chunk.start] for chunk in chunks]
        return self._replay(size, chunks, token_ids)

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

    def choose_guided(self, rows: SequenceOf[int], sequences: list[Sequence]) -> Tensor | None:
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
        """Launches the step of the tokens chosen in `rows` by the last launch; the tokens of the last chunks, of guided
        sequences, are known."""
        size = self._size(len(chunks))
        # Known to the device alone; as many of each. The rules of a guided row are filled with its mask.
        unknown = chunks[0].start + 1 - len(chunks[0].sequence.tokens)
        known = [chunk.sequence.tokens[chunk.start] for chunk in chunks[len(rows) :]]
        return self._replay(size, chunks, [-1 - row for row in rows] + known, unknown)

    def _replay(
        self,
        size: int,
        chunks: SequenceOf[Chunk],
        token_ids: SequenceOf[int],
        unknown: int | Numbers = 0,
    ) -> Rows:
        count, log_probs = len(chunks), None
        found = self._inputs.fill(chunks, size, token_ids, unknown)
        if self._ruled:
            self._ruled.fill(found, unknown)
        logits = self._compute(size, chunks)
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
