"""A step's chunks as a single flat batch and a single forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.compute.device import Drafted, Forward
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.attention import Attention, StepTokens, attach
from trtmesh.engine.backends.torch.model.lora_layers import AdapterRows
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.model.prompt_tables import PromptTable
from trtmesh.engine.backends.torch.sampling.choice import Chooser, TokenChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.readers import Reader
from trtmesh.engine.backends.torch.sequence import Chunk
from trtmesh.engine.scheduling.blocks import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class Batch:
    """The flat batch of a step."""

    token_ids: Tensor
    """[tokens]"""
    positions: Tensor
    """[tokens]"""
    step: StepTokens
    tables: list[tuple[slice, PromptTable]]
    """Prompt tables with their ranges of tokens."""
    kept_rows: Tensor
    """Tokens with needed logits, first for `completing`, then for the drafts, then for `reading`."""
    completing: list[Chunk]
    drafted: list[Chunk]
    """Completing chunks with drafts. Their drafts' rows follow those of `completing`."""
    reading: list[tuple[Chunk, int]]
    """Chunks with the number of logits for their readers."""
    adapters: list[AdapterRows]


class Runner:
    """Implements Compute with PyTorch operations, in sequence."""

    may_follow = False
    captured_steps = 0
    most_run_tokens = None

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        tables: BlockTables,
        attention: Attention,
        chooser: Chooser,
        release_memory: Callable[[], None],
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """`synchronize` waits for a device; None without delay."""
        self._model = model
        self._cache = cache
        self._tables = tables.rows
        self._attention = attention
        self._device = cache.pool.device
        attach(model.module, attention)
        self.move = cache.carry_out
        self.choose = chooser.choose
        self.rank = chooser.rank
        self.release_memory = release_memory
        self._synchronize = synchronize

    def forward(
        self, chunks: Sequence[Chunk], written: Callable[[int], None] | None = None
    ) -> Forward:
        return self.compute(self.prepare(chunks), written)

    def prepare(self, chunks: Sequence[Chunk]) -> Batch:
        """Lays the chunks out as a flat batch, and copies it to the device."""
        ordered = sorted(chunks, key=lambda chunk: (chunk.count > 1, chunk.start))
        token_ids: list[int] = []
        rows: list[int] = []
        completing: list[Chunk] = []
        drafted: list[Chunk] = []
        draft_rows: list[int] = []
        tables: list[tuple[slice, PromptTable]] = []
        reading: list[tuple[Chunk, range]] = []
        for chunk in ordered:
            sequence, first = chunk.sequence, len(token_ids)
            table = sequence.prompt_table
            if table and chunk.start < sequence.prompt_tokens:
                tables.append((slice(first, first + chunk.count), table))
            if chunk.count == 1:
                token_ids.append(sequence.tokens[chunk.start])
            else:
                token_ids += sequence.tokens[chunk.start : chunk.known_end]
            if chunk.completes:
                completing.append(chunk)
                rows.append(len(token_ids) - 1)
            if chunk.drafts:
                drafted.append(chunk)
                draft_rows += range(len(token_ids), len(token_ids) + len(chunk.drafts))
                token_ids += chunk.drafts
            # A paused sequence computes positions again after the reader has read these.
            if sequence.reader and (wanted := _wanted(sequence.reader, chunk, first)):
                reading.append((chunk, wanted))
        rows += draft_rows
        for _, wanted in reading:
            rows += wanted
        step, positions = self._step(ordered)
        return Batch(
            token_ids=torch.tensor(token_ids, device=self._device),
            positions=positions,
            step=step,
            tables=tables,
            # transformers takes no rows at all for all rows.
            kept_rows=torch.tensor(rows or [len(token_ids) - 1], device=self._device),
            completing=completing,
            drafted=drafted,
            reading=[(chunk, len(wanted)) for chunk, wanted in reading],
            adapters=adapter_rows(ordered),
        )

    def synchronize(self) -> None:
        if self._synchronize:
            self._synchronize()

    def compute(self, batch: Batch, written: Callable[[int], None] | None = None) -> Forward:
        """`forward` of a prepared batch."""
        self._attention.begin(batch.step, None if self._synchronize else written)
        if self._model.adapters:
            self._model.adapters.begin(batch.adapters)
        with torch.inference_mode():
            logits = self._model.logits(
                batch.token_ids, batch.positions, batch.kept_rows, batch.tables
            )
        row = len(batch.completing)
        drafted, given = [], []
        for chunk in batch.drafted:
            drafted.append(Drafted(chunk, logits[row : row + len(chunk.drafts)]))
            row += len(chunk.drafts)
        for chunk, count in batch.reading:
            given.append((chunk, logits[row : row + count]))
            row += count
        return Forward(batch.completing, logits[: len(batch.completing)], given, drafted)

    def follow(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> Forward:
        raise NotImplementedError("a step is prepared from tokens that were read")

    def verify(self, drafted: Sequence[Drafted], position: int) -> TokenChoice:
        rows = torch.stack([each.logits[position] for each in drafted])
        return self.choose([each.chunk.sequence for each in drafted], rows)

    def can_follow(self, chunk: Chunk) -> bool:
        return False

    def awaits(self, sequences: Sequence[Continuation]) -> bool:
        return False

    def check(self) -> None:
        blocks = self._tables[0].copy()
        self._tables[0] = NULL_BLOCK
        try:
            self._check()
        finally:
            self._tables[0] = blocks

    def _check(self) -> None:
        """As of a sequence without blocks in the first row of the table."""
        one = np.zeros(1, dtype=np.int64)
        null = np.full(1, NULL_BLOCK, dtype=np.int64)
        rows = torch.from_numpy(self._cache.rows_of_tokens(null, one).reshape(-1))
        # As a chunk, not a single: only a single gathers blocks.
        self._attention.begin(StepTokens(one, one, one + 1, 0, rows.to(self._device)))
        if self._model.adapters:
            self._model.adapters.begin(())
        token = torch.zeros(1, dtype=torch.int64, device=self._device)
        with torch.inference_mode():
            logits = self._model.logits(token, token, token)
            self._cache.pool[NULL_BLOCK] = 0
        if not bool(torch.isfinite(logits.amax())):
            raise FloatingPointError("the model's logits are not finite for a token on its own")

    def _step(self, chunks: Sequence[Chunk]) -> tuple[StepTokens, Tensor]:
        """The input of attention, and the positions of the tokens [tokens]."""
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
        rows = torch.from_numpy(token_rows).to(self._device)
        step = StepTokens(slots, starts, counts, singles, rows)
        return step, torch.from_numpy(positions).to(self._device)


def adapter_rows(ordered: Sequence[Chunk]) -> list[AdapterRows]:
    """The tokens of each adapter in a flat batch of chunks in this order."""
    rows: dict[int, list[int]] = {}
    first = 0
    for chunk in ordered:
        last = first + chunk.count
        if adapter := chunk.sequence.adapter:
            rows.setdefault(adapter.slot, []).extend(range(first, last))
        first = last
    return [AdapterRows(slot, found) for slot, found in rows.items()]


def _wanted(reader: Reader, chunk: Chunk, first_row: int) -> range:
    """Rows of the flat batch with logits for the reader; the chunk begins at `first_row`."""
    first = max(reader.next, chunk.start)
    last = min(reader.end, chunk.start + chunk.count)
    return range(first_row + first - chunk.start, first_row + last - chunk.start)
