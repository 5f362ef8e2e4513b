"""Short chunks of prompts as captured graphs, one for each of some numbers of tokens.

Operation by operation, a short prompt costs the time in which the host starts kernels. A graph has the forward of the
model over static inputs; what a batch leaves over is filled up with tokens that only the null block stores.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.compute.device import Batch
from trtmesh.engine.backends.torch.cuda.decode_graphs import Record
from trtmesh.engine.backends.torch.cuda.graph_attention import GraphAttention
from trtmesh.engine.backends.torch.memory.blocks import NULL_BLOCK, BlockTables
from trtmesh.engine.backends.torch.memory.kvcache import KvCache
from trtmesh.engine.backends.torch.model.attention import StepTokens
from trtmesh.engine.backends.torch.model.model import Model

log = logging.getLogger(__name__)

SIZES = (64, 128, 256, *range(384, 2049, 128))
"""Tokens of a graph. Beyond, the device takes longer than the host, and what fills up would cost more than it saves."""

MOST_CHUNKS = 16


class ChunkGraphs:
    """Computes batches of few chunks with few tokens."""

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        tables: BlockTables,
        attention: GraphAttention,
        most_tokens: int,
        record: Record,
    ) -> None:
        """`most_tokens` are those of the largest step, beyond which no graph is useful."""
        self._model = model
        self._sizes = sizes(most_tokens)
        self._tables = tables.rows
        self._tokens_per_block = cache.tokens_per_block
        null = np.full(1, NULL_BLOCK, dtype=np.int64)
        null_rows = cache.rows_of_tokens(null, np.zeros(1, dtype=np.int64)).reshape(-1)
        self._rows_per_token = len(null_rows)
        most, device = self._sizes[-1], cache.pool.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._token_ids, self._positions, self._kept_rows = (
            zeros(most),
            zeros(most),
            zeros(MOST_CHUNKS),
        )
        self._null_rows = torch.from_numpy(np.tile(null_rows, most)).to(device)
        self._token_rows = self._null_rows.clone()
        # The last row stays the null block's, for tokens that only fill up.
        self._table = zeros(MOST_CHUNKS + 1, self._tables.shape[1])
        self._chunks = attention.static_chunks(self._positions, self._table)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._capture(record)

    def takes(self, batch: Batch) -> bool:
        """Whether a graph can compute a batch."""
        return (
            bool(self._replays)
            and len(batch.token_ids) <= self._sizes[-1]
            and len(batch.step.slots) <= MOST_CHUNKS
            and not (batch.tables or batch.reading or batch.adapters)
        )

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Tensor:
        """The logits of the completing chunks [completing, vocabulary]."""
        count = len(batch.token_ids)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._fill(batch, count, size)
        return self._replays[size]()[: len(batch.completing)].clone()

    def _fill(self, batch: Batch, count: int, size: int) -> None:
        step, each = batch.step, self._rows_per_token
        self._token_ids[:count].copy_(batch.token_ids)
        self._token_ids[count:size].zero_()
        self._positions[:count].copy_(batch.positions)
        self._positions[count:size].zero_()
        self._token_rows[: count * each].copy_(step.token_rows)
        self._token_rows[count * each : size * each].copy_(self._null_rows[: (size - count) * each])
        self._kept_rows[: len(batch.kept_rows)].copy_(batch.kept_rows)
        self._kept_rows[len(batch.kept_rows) :].zero_()
        width = int(-(-(step.starts + step.counts).max() // self._tokens_per_block))
        table = torch.from_numpy(self._tables[step.slots, :width])
        self._table[: len(step.slots), :width].copy_(table)
        self._chunks.fill(step, size)

    @torch.inference_mode()
    def _capture(self, record: Record) -> None:
        if self._model.adapters:
            self._model.adapters.begin(())
        begun = time.monotonic()
        try:
            for size in reversed(self._sizes):
                self._replays[size] = record(partial(self._step, size))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the model still runs, only slower
            self._replays = {}
            log.warning(
                "chunks of prompts of model type %s cannot be captured and run operation by operation: %s",
                self._model.module.config.model_type,
                error,
            )
            return
        log.info(
            "captured chunks of up to %d tokens as %d graphs in %.1f s",
            self._sizes[-1],
            len(self._sizes),
            time.monotonic() - begun,
        )

    def _step(self, size: int) -> Tensor:
        none = np.zeros(0, dtype=np.int64)
        token_rows = self._token_rows[: size * self._rows_per_token]
        self._chunks.begin(StepTokens(none, none, none, 0, token_rows), size)
        return self._model.logits(self._token_ids[:size], self._positions[:size], self._kept_rows)


def sizes(most_tokens: int) -> list[int]:
    """Numbers of tokens with a graph, for steps of up to `most_tokens`."""
    most = min(most_tokens, SIZES[-1])
    return [*(size for size in SIZES if size < most), most]
