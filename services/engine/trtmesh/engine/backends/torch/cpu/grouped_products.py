"""The updates of a step's adapters on a CPU: few and large products.

With a token or two per adapter, reading the updates outweighs the arithmetic, and every operation costs microseconds at
the start. So neighbouring slots with few rows are a batched product over their tables; an adapter with many rows is a
separate product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.model.lora_layers import AdaptedPart, AdapterRows

FEW_ROWS = 16
"""Most rows of an adapter computed with others."""


@dataclass(frozen=True, slots=True)
class Single:
    """A slot with rows multiplied alone."""

    slot: int
    rows: Tensor | slice
    """Of the flat batch; a slice where they lie side by side."""

    def add(self, parts: Sequence[AdaptedPart], given: Tensor, output: Tensor) -> None:
        rows = given[self.rows]
        for part in parts:
            if rank := part.table.ranks[self.slot]:
                a, b = part.table.a[self.slot, :rank], part.table.b[self.slot, :rank]
                inner = torch.mm(rows, a.t())
                if isinstance(self.rows, slice):
                    output[self.rows, part.outputs].addmm_(inner, b)
                else:
                    output[:, part.outputs].index_add_(0, self.rows, torch.mm(inner, b))


@dataclass(frozen=True, slots=True)
class Batched:
    """Neighbouring slots with a few rows each, filled up to the same number."""

    slots: slice
    rows: Tensor
    """[slots * most rows] of the flat batch; filling repeats a row of the same slot."""
    filling: Tensor
    """[slots, most rows, 1], true for filling rows."""

    def add(self, parts: Sequence[AdaptedPart], given: Tensor, output: Tensor) -> None:
        ranks = [max(part.table.ranks[self.slots]) for part in parts]
        if any(ranks):
            slots, rows, _ = self.filling.shape
            taken = given.index_select(0, self.rows).view(slots, rows, -1)
            deltas = [self._delta(*each, taken) for each in zip(parts, ranks, strict=True)]
            delta = deltas[0] if len(deltas) == 1 else torch.cat(deltas, 2)
            output.index_add_(0, self.rows, delta.view(slots * rows, -1))

    def _delta(self, part: AdaptedPart, rank: int, taken: Tensor) -> Tensor:
        """B A x as [slots, rows, outputs]."""
        a, b = part.table.a[self.slots, :rank], part.table.b[self.slots, :rank]
        inner = torch.bmm(taken, a.transpose(1, 2)).masked_fill_(self.filling, 0)
        return torch.bmm(inner, b)


class GroupedProducts:
    """Implements Products with few groups of slots."""

    def __init__(self) -> None:
        self._groups: list[Single | Batched] = []

    def begin(self, step: Sequence[AdapterRows]) -> None:
        self._groups = [
            _batched(run) if len(run) > 1 else Single(run[0].slot, _side_by_side(run[0].rows))
            for run in _runs(step)
        ]

    def add(self, parts: Sequence[AdaptedPart], given: Tensor, output: Tensor) -> None:
        for group in self._groups:
            group.add(parts, given, output)


def _runs(step: Sequence[AdapterRows]) -> Iterator[list[AdapterRows]]:
    """Adapters to compute together."""
    run: list[AdapterRows] = []
    for each in sorted(step, key=lambda each: each.slot):
        joins = run and each.slot == run[-1].slot + 1
        if run and not (joins and max(len(each.rows), len(run[-1].rows)) <= FEW_ROWS):
            yield run
            run = []
        run.append(each)
    yield run


def _batched(run: Sequence[AdapterRows]) -> Batched:
    counts = [len(each.rows) for each in run]
    most = max(counts)
    rows = [row for each in run for row in (*each.rows, *[each.rows[0]] * (most - len(each.rows)))]
    filling = torch.arange(most) >= torch.tensor(counts)[:, None]
    return Batched(slice(run[0].slot, run[-1].slot + 1), torch.tensor(rows), filling[..., None])


def _side_by_side(rows: Sequence[int]) -> Tensor | slice:
    first, last = rows[0], rows[-1] + 1
    return slice(first, last) if last - first == len(rows) else torch.tensor(rows)
