"""From the chunks of a step to logits: one flat batch, one forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.compute.attention import PagedAttention, attach
from trtmesh.engine.backends.torch.cpu.grouping import StepTokens
from trtmesh.engine.backends.torch.memory.block_tables import BlockTables
from trtmesh.engine.backends.torch.memory.blocks import NULL_BLOCK
from trtmesh.engine.backends.torch.memory.kvcache import KvCache
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.model.prompt_table import PromptTable
from trtmesh.engine.backends.torch.scheduling.chunk import Chunk


class Runner:
    """Computes chunks with a model over a cache."""

    def __init__(
        self, model: Model, cache: KvCache, tables: BlockTables, *, decode_copy_bytes: int = 0
    ) -> None:
        self._model = model
        self._cache = cache
        self._tables = tables.rows
        self._attention = PagedAttention(cache, tables, model.compute_dtype, decode_copy_bytes)
        attach(model.module, self._attention)

    def compute(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], Tensor | None]:
        """Writes the KV of all chunks; returns those that complete their sequences and their logits. Chunks keep what
        the readers of their sequences want.

        The logits are [completing chunks, vocabulary], float32; None where there is none.
        """
        ordered = sorted(chunks, key=lambda chunk: (chunk.count > 1, chunk.start))
        token_ids: list[int] = []
        rows: list[int] = []
        completing: list[Chunk] = []
        tables: list[tuple[slice, PromptTable]] = []
        reading: list[tuple[Chunk, range]] = []
        for chunk in ordered:
            tokens = chunk.sequence.tokens
            table = chunk.sequence.prompt_table
            if table and chunk.start < chunk.sequence.prompt_tokens:
                tables.append((slice(len(token_ids), len(token_ids) + chunk.count), table))
            if chunk.count == 1:
                token_ids.append(tokens[chunk.start])
            else:
                token_ids += tokens[chunk.start : chunk.start + chunk.count]
            if chunk.completes:
                completing.append(chunk)
                rows.append(len(token_ids) - 1)
            # What a paused sequence has read already it only computes again.
            if chunk.sequence.reader and (
                wanted := _wanted(chunk, first_row=len(token_ids) - chunk.count)
            ):
                reading.append((chunk, wanted))
        for _, wanted in reading:
            rows += wanted
        device = self._cache.pool.device
        step, positions = self._step(ordered)
        self._attention.begin(step)
        # With no row to keep the head still gets one, because no rows at all would mean all of them.
        kept = torch.tensor(rows or [len(token_ids) - 1], device=device)
        ids = torch.tensor(token_ids, device=device)
        with torch.inference_mode():
            logits = self._model.logits(ids, positions, kept, tables)
        position = len(completing)
        for chunk, wanted in reading:
            chunk.given_logits = logits[position : position + len(wanted)]
            position += len(wanted)
        return completing, logits[: len(completing)] if completing else None

    def check(self) -> None:
        """Computes one token that is no sequence's. Raises whatever keeps the model from computing anything at all."""
        device = self._cache.pool.device
        one = np.zeros(1, dtype=np.int64)
        null = np.full(1, NULL_BLOCK, dtype=np.int64)
        rows = torch.from_numpy(self._cache.rows_of_tokens(null, one).reshape(-1)).to(device)
        # Not a single, for that would gather blocks: a beginning sees only what the step itself brings.
        self._attention.begin(StepTokens(one, one, one + 1, 0, rows))
        token = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.inference_mode():
            logits = self._model.logits(token, token, token)
            self._cache.pool[NULL_BLOCK] = 0
        if not bool(torch.isfinite(logits.amax())):
            raise FloatingPointError("the model's logits are not finite for a token on its own")

    def release_memory(self) -> None:
        """Gives back what the allocator keeps for later, after something found no memory."""
        if self._cache.pool.is_cuda:
            torch.cuda.empty_cache()

    def _step(self, chunks: Sequence[Chunk]) -> tuple[StepTokens, Tensor]:
        """What attention must know, and the positions of the tokens [tokens]."""
        slots = np.array([chunk.sequence.slot for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        singles = int((counts == 1).sum())
        if singles == len(chunks):
            positions, token_slots = starts, slots
        else:
            first_tokens = np.cumsum(counts) - counts
            within = np.arange(int(counts.sum())) - np.repeat(first_tokens, counts)
            positions = np.repeat(starts, counts) + within
            token_slots = np.repeat(slots, counts)
        blocks = self._tables[token_slots, positions // self._cache.tokens_per_block]
        token_rows = self._cache.rows_of_tokens(blocks, positions).reshape(-1)
        device = self._cache.pool.device
        step = StepTokens(slots, starts, counts, singles, torch.from_numpy(token_rows).to(device))
        return step, torch.from_numpy(positions).to(device)


def _wanted(chunk: Chunk, *, first_row: int) -> range:
    """Rows of the flat batch, in which the chunk begins at `first_row`, whose logits the sequence's reader wants."""
    reader = chunk.sequence.reader
    assert reader is not None
    first = max(reader.next, chunk.start)
    last = min(reader.end, chunk.start + chunk.count)
    return range(first_row + first - chunk.start, first_row + last - chunk.start)
