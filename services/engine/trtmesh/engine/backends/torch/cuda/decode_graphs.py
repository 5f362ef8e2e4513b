"""Decode steps as captured graphs, one for each of some numbers of rows.

A graph holds the forward of the model over static inputs and the choice of the tokens. A step with fewer rows than a
graph has fills it up with rows that store nothing.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.graph_attention import GraphAttention
from trtmesh.engine.backends.torch.cuda.kernels.race import choose_tokens, known_tokens
from trtmesh.engine.backends.torch.cuda.step_inputs import StepInputs
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.scheduling.sequence import Chunk

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
FURTHER = 128
"""Distance of sizes beyond."""

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Captures an operation; returns what computes it again and returns the same tensor."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The results of a graph, overwritten by its next launch."""

    logits: Tensor
    """[rows, vocabulary], in the type in which the model computes them"""
    tokens: Tensor
    """The highest logits, or draws without filters, [rows] int64."""


class DecodeGraphs:
    """Computes chunks of one token each that complete their sequences."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        inputs: StepInputs,
        most_rows: int,
        record: Record,
        share: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`share` gives other ranks the tokens that the first has chosen; None on a single device."""
        self._share = share
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._tokens = torch.zeros_like(inputs.positions[:most_rows])
        self._sizes = sizes(most_rows)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._capture(record)

    def takes(self, chunk: Chunk) -> bool:
        """Whether a graph can compute a chunk."""
        sequence = chunk.sequence
        return (
            chunk.count == 1
            and chunk.completes
            and bool(self._replays)
            and sequence.reader is None
            and sequence.adapter is None
            and (sequence.prompt_table is None or chunk.start >= sequence.prompt_tokens)
        )

    def launch(self, chunks: SequenceOf[Chunk]) -> Rows:
        size = self._size(len(chunks))
        self._inputs.fill(chunks, size)
        return self._replay(size, len(chunks))

    @torch.inference_mode()
    def follow(self, chunks: SequenceOf[Chunk], rows: SequenceOf[int]) -> Rows:
        """Launches the step of the tokens that the last launch chose in its `rows`."""
        size = self._size(len(chunks))
        self._inputs.fill_chosen(chunks, size, rows)
        return self._replay(size, len(chunks))

    def _size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]

    def _replay(self, size: int, count: int) -> Rows:
        logits = self._replays[size]()
        return Rows(logits[:count], self._tokens[:count])

    @torch.inference_mode()
    def _capture(self, record: Record) -> None:
        if self._model.adapters:
            self._model.adapters.begin(())
        begun = time.monotonic()
        try:
            # The largest first, so that the smaller ones share its memory.
            for size in reversed(self._sizes):
                self._replays[size] = record(partial(self._step, size))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the model still runs, only slower
            self._replays = {}
            log.warning(
                "decode steps of model type %s cannot be captured and run operation by operation: %s",
                self._model.module.config.model_type,
                error,
            )
            return
        log.info(
            "captured decode steps of up to %d sequences as %d graphs in %.1f s",
            self._sizes[-1],
            len(self._sizes),
            time.monotonic() - begun,
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
