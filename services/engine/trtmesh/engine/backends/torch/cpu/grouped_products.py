"""The updates of a step's adapters on a CPU: few and large products.

With a token or two per adapter, the updates are read once and hardly computed with, and every operation costs
microseconds before it begins. So neighbouring slots are one batched product over their tables, padded to the same
number of rows; an adapter with many rows is a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.model.lora_layers import AdapterRows, Part

FEW_ROWS = 16
"""Most rows of an adapter that is computed with others."""


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring slots, each with the same number of rows."""

    slots: slice
    rows: Tensor | slice
    """[slots * rows] of the flat batch; a slice where they lie side by side."""
    shape: tuple[int, int]
    """Slots and rows of each."""
    padding: Tensor | None
    """[slots, rows, 1], true for rows that only fill up; they repeat a row of the same slot."""

    def take(self, given: Tensor) -> Tensor:
        rows = (
            given[self.rows] if isinstance(self.rows, slice) else given.index_select(0, self.rows)
        )
        return rows.view(*self.shape, -1)

    def put(self, output: Tensor, delta: Tensor) -> None:
        """Adds `delta` [slots, rows, outputs]."""
        delta = delta.view(-1, delta.shape[-1])
        if isinstance(self.rows, slice):
            output[self.rows] += delta
        else:
            output.index_add_(0, self.rows, delta)


class GroupedProducts:
    """Implements Products with a batched product for each group of slots."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def begin(self, step: Sequence[AdapterRows]) -> None:
        self._groups = [_group(run) for run in _runs(step)]

    def add(self, parts: Sequence[Part], given: Tensor, output: Tensor) -> None:
        for group in self._groups:
            ranks = [max(part.table.ranks[group.slots]) for part in parts]
            if any(ranks):
                rows = group.take(given)
                deltas = [
                    _delta(group, part, rank, rows) for part, rank in zip(parts, ranks, strict=True)
                ]
                group.put(output, deltas[0] if len(deltas) == 1 else torch.cat(deltas, 2))


def _delta(group: Group, part: Part, rank: int, rows: Tensor) -> Tensor:
    """B A x as [slots, rows, outputs]."""
    a, b = part.table.a[group.slots, :rank], part.table.b[group.slots, :rank]
    inner = torch.bmm(rows, a.transpose(1, 2))
    if group.padding is not None:
        inner.masked_fill_(group.padding, 0)
    return torch.bmm(inner, b)


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


def _group(run: Sequence[AdapterRows]) -> Group:
    counts = [len(each.rows) for each in run]
    most = max(counts)
    rows = [row for each in run for row in (*each.rows, *[each.rows[0]] * (most - len(each.rows)))]
    padding = None
    if min(counts) < most:
        padding = (torch.arange(most) >= torch.tensor(counts)[:, None])[..., None]
    side_by_side = rows == list(range(rows[0], rows[0] + len(rows)))
    return Group(
        slice(run[0].slot, run[-1].slot + 1),
        slice(rows[0], rows[-1] + 1) if side_by_side else torch.tensor(rows),
        (len(run), most),
        padding,
    )
