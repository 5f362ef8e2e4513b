"""Adapters by kernels: tables filled beside the steps, and the tiles of a step in memory that stays, for graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.adapters.lora import Target, Update
from trtmesh.engine.backends.torch.compute.runner import adapter_rows
from trtmesh.engine.backends.torch.cuda.capturing import Record, Replay, capture
from trtmesh.engine.backends.torch.cuda.kernels.updates import (
    MANY_ROWS,
    RANKS,
    TILE_WORDS,
    UNIT_WORDS,
    Factors,
    Tiles,
    Updates,
    expand,
    most_inner_bytes,
    shrink,
)
from trtmesh.engine.backends.torch.cuda.pinned import StagedWords
from trtmesh.engine.backends.torch.model.lora_layers import (
    AdaptedPart,
    AdapterRows,
    DeviceAdapters,
    SlotMemory,
    UpdateTable,
)
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.sequence import Chunk


class KernelTable(UpdateTable):
    """With the ranks on the device."""

    def __init__(
        self,
        memory: PinnedSlots,
        target: Target,
        slots: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(target, slots, ranks, dtype, device)
        self.factors = Factors(self.a, self.b, torch.zeros(slots, dtype=torch.int32, device=device))
        self.memory = memory

    def put(self, slot: int, update: Update | None) -> None:
        super().put(slot, self.memory.staged(update) if update else None)
        self.factors.ranks[slot] = self.ranks[slot]
        self.memory.ranks[slot] = max(self.memory.ranks[slot], self.ranks[slot])


class PinnedSlots(SlotMemory):
    """Fills tables from pinned memory by a stream of its own, so that no step waits."""

    def __init__(self, device: torch.device) -> None:
        untyped: Any = torch.cuda
        self._device = device
        self._stream = untyped.Stream(device) if device.type == "cuda" else None
        self._pinned = torch.empty(0)
        self.ranks: dict[int, int] = {}
        """The most ranks of an adapter in any table, by slot."""

    def table(
        self, target: Target, slots: int, ranks: int, dtype: torch.dtype, device: torch.device
    ) -> UpdateTable:
        size = ranks * (target.inputs + target.outputs)
        if size > len(self._pinned):
            pins = self._stream is not None
            self._pinned = torch.empty(size, dtype=dtype, pin_memory=pins)
        return KernelTable(self, target, slots, ranks, dtype, device)

    @contextmanager
    def filling(self, slot: int) -> Iterator[None]:
        self.ranks[slot] = 0
        if self._stream is None:
            yield
            return
        # A step launched ahead may still read the slot for a sequence that has ended.
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def staged(self, update: Update) -> Update:
        """The update in pinned memory, until the next call."""
        rank, size = update.rank, update.a.numel()
        a = self._pinned[:size].view(rank, -1)
        b = self._pinned[size : size + update.b.numel()].view(rank, -1)
        a.copy_(update.a)
        # In the order of the table.
        b.copy_(update.b.t())
        return Update(a, b.t())


class StepTiles:
    """The tiles of steps with up to `most_rows` rows of up to `most_slots` adapters, in memory that stays."""

    def __init__(
        self, tables: Collection[UpdateTable], most_rows: int, tile_rows: int, most_slots: int
    ) -> None:
        table = next(iter(tables))
        assert isinstance(table, KernelTable)
        self._ranks = table.memory.ranks
        self._most_runs = most_rank(tables) // RANKS
        self._tile_rows = tile_rows
        self._most_slots = most_slots
        self._first_row = TILE_WORDS * self._most_tiles(most_rows)
        self._first_slot = self._first_row + most_rows
        self._first_unit = self._first_slot + most_rows
        words = self._first_unit + UNIT_WORDS * self._most_units(most_rows)
        self._staged = StagedWords(words, table.a.device)
        self._step: Sequence[tuple[AdapterRows, int]] = ()
        self._fill(())

    def of(self, rows: int) -> Tiles:
        """The tiles of any step with so many rows; some have no rows."""
        buffer = self._staged.buffer
        words = buffer[: TILE_WORDS * self._most_tiles(rows)].view(-1, TILE_WORDS)
        order = buffer[self._first_row : self._first_slot]
        slots = buffer[self._first_slot : self._first_unit]
        units = buffer[self._first_unit :].view(-1, UNIT_WORDS)[: self._most_units(rows)]
        return Tiles(words, order, slots, units, self._tile_rows)

    def fill(self, step: Sequence[AdapterRows]) -> None:
        """Takes the rows of the adapters; of a step like the last one, nothing is copied."""
        found = [(each, self._ranks[each.slot]) for each in step]
        if found != self._step:
            self._step = found
            self._fill(found)

    def _fill(self, step: Sequence[tuple[AdapterRows, int]]) -> None:
        """Takes the rows of adapters with their ranks. The rows without an adapter come last, in order: the step may
        have any of these."""
        words = self._staged.begin()
        tiles = words[: self._first_row].reshape(-1, TILE_WORDS)
        order, slots = words[self._first_row : self._first_unit].reshape(2, -1)
        units = words[self._first_unit :].reshape(-1, UNIT_WORDS)
        slots[:] = -1
        at = tile = unit = 0
        for each, rank in step:
            count = len(each.rows)
            for first in range(0, rank, RANKS):
                unit += 1
                units[unit] = each.slot, first
            order[at : at + count] = each.rows
            slots[each.rows] = each.slot
            for first in range(0, count, self._tile_rows):
                tiles[tile] = each.slot, at + first, min(self._tile_rows, count - first), 0
                tile += 1
            at += count
        units[0] = unit, 0
        order[at:] = np.flatnonzero(slots < 0)
        tiles[tile:] = -1, len(order), 0, 0
        free = np.arange(at, len(order), self._tile_rows)
        tiles[tile : tile + len(free), 1] = free
        tiles[tile : tile + len(free), 2] = np.minimum(self._tile_rows, len(order) - free)
        self._staged.send(len(words))

    def _most_tiles(self, rows: int) -> int:
        return min(rows, rows // self._tile_rows + self._most_slots + 1)

    def _most_units(self, rows: int) -> int:
        """With the words of their number."""
        return 1 + min(rows, self._most_slots) * self._most_runs


def most_rank(tables: Collection[UpdateTable]) -> int:
    return max(table.a.shape[1] for table in tables)


class KernelUpdates:
    """Implements Products. The kernels read the tiles of a step from the device, so a graph serves any adapters."""

    def __init__(self, tables: Collection[UpdateTable], max_tokens: int) -> None:
        self.tables = tables
        self.slots = len(next(iter(tables)).a)
        self._own = StepTiles(tables, max_tokens, MANY_ROWS, self.slots)
        self._tiles = self._own

    def most_bytes(self, tokens: int) -> int:
        """Memory for a layer of a step with so many tokens."""
        return most_inner_bytes(tokens, most_rank(self.tables))

    def begin(self, step: Sequence[AdapterRows]) -> None:
        self._own.fill(step)
        self.use(self._own)

    def use(self, tiles: StepTiles) -> None:
        """Takes the tiles of the next steps from there."""
        self._tiles = tiles

    def add(self, parts: Sequence[AdaptedPart], given: Tensor, output: Tensor) -> None:
        updates = self.of(parts, len(given))
        expand(updates, shrink(updates, given), output)

    def of(self, parts: Sequence[AdaptedPart], rows: int) -> Updates:
        """The updates of a layer in this step, which has so many rows."""
        tables = [part.table for part in parts]
        return Updates(
            self._tiles.of(rows), [t.factors for t in tables if isinstance(t, KernelTable)]
        )


class AdaptedSteps:
    """The same steps with adapters: to be captured as further graphs, so that others cost no more for them."""

    def __init__(
        self,
        adapters: DeviceAdapters,
        updates: KernelUpdates,
        most_rows: int,
        tile_rows: int,
        most_chunks: int,
    ) -> None:
        self._adapters = adapters
        self._updates = updates
        most_slots = min(updates.slots, most_chunks)
        self._tiles = StepTiles(updates.tables, most_rows, tile_rows, most_slots)

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Takes the adapters of a flat batch of chunks."""
        self._tiles.fill(adapter_rows(chunks))

    def capture(
        self,
        model: Model,
        record: Record,
        step: Callable[[int], Tensor],
        plain: Mapping[int, Replay],
        what: str,
        unit: str,
    ) -> dict[int, Replay]:
        """The graphs of `step`, whose results lie where those of the graphs in `plain` do; see `capture`."""
        if not plain:
            return {}
        results = {size: replay() for size, replay in plain.items()}

        def adapted(rows: int) -> Tensor:
            self._updates.use(self._tiles)
            with self._adapters.adapted():
                return results[rows].copy_(step(rows))

        return capture(model, record, adapted, sorted(plain), f"{what} with adapters", unit)
