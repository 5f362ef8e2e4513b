"""Steps as captured graphs, each of some size."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import LOG_PROB_WORDS
from trtmesh.engine.backends.torch.memory.shortage import shortage
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.sequence import Chunk

log = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
"""Computes a captured operation again; returns the same tensor."""
Record = Callable[[Callable[[], Tensor]], Replay]
"""Captures an operation."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The results of a graph; the next launch may overwrite them."""

    logits: Tensor
    """[rows, vocabulary], in the model's type of computation."""
    tokens: Tensor
    """The choice in each row, or in the first rows, [rows] int64; means nothing for a row chosen by the host."""
    log_probs: Tensor | None = None
    """[rows, LOG_PROB_WORDS] where a row asks for them."""


def joined(parts: SequenceOf[Rows]) -> Tensor | None:
    """The log-probabilities of the rows of all parts."""
    if all(part.log_probs is None for part in parts):
        return None
    return torch.cat(
        [
            part.logits.new_zeros(len(part.tokens), LOG_PROB_WORDS, dtype=torch.float64)
            if part.log_probs is None
            else part.log_probs
            for part in parts
        ]
    )


@torch.inference_mode()
def capture(
    model: Model,
    record: Record,
    step: Callable[[int], Tensor],
    sizes: SequenceOf[int],
    what: str,
    unit: str,
) -> dict[int, Replay]:
    """The graphs of `step` by ascending size. None where capturing fails: the model still runs, only slower.

    `what` and `unit` name steps and the unit of their sizes.
    """
    if model.adapters:
        model.adapters.begin(())
    begun = time.monotonic()
    replays: dict[int, Replay] = {}
    try:
        # The largest first: the smaller graphs share this memory.
        for size in reversed(sizes):
            replays[size] = record(partial(step, size))
    except Exception as error:
        if shortage(error) is not None:
            raise
        # Any operation may refuse.
        log.warning(
            "%s of model type %s cannot be captured and run operation by operation: %s",
            what,
            model.module.config.model_type,
            error,
        )
        return {}
    log.info(
        "captured %s of up to %d %s as %d graphs in %.1f s",
        what,
        sizes[-1],
        unit,
        len(sizes),
        time.monotonic() - begun,
    )
    return replays


def needs_only_tokens(chunk: Chunk, *, adapted: bool) -> bool:
    """Whether the forward of a chunk is a function of tokens, blocks and, where `adapted`, slots alone, as in a
    graph."""
    sequence = chunk.sequence
    return (
        sequence.reader is None
        and (adapted or sequence.adapter is None)
        and (sequence.prompt_table is None or chunk.start >= sequence.prompt_tokens)
    )
