"""The updates of a step's adapters by the same operations on the same shapes in every step, as a captured graph needs.

All slots are multiplied with all tokens, and a mask keeps the slot of each token: two products per layer, whatever the
adapters. The mask is the only input of a step, in memory that stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.model.lora_layers import AdaptedPart, AdapterRows, UpdateTable


class SlotProducts:
    """Implements Products with static shapes. Neither method waits for the device."""

    def __init__(self, tables: Collection[UpdateTable], max_tokens: int) -> None:
        slots = next(iter(tables)).a
        self._others = slots.new_ones(max_tokens, len(slots), 1, dtype=torch.bool)
        """[tokens, slots, 1], false for the slot of a token."""

    def begin(self, step: Sequence[AdapterRows]) -> None:
        others = torch.ones(self._others.shape, dtype=torch.bool)
        for each in step:
            others[each.rows, each.slot] = False
        self._others.copy_(others, non_blocking=True)

    def add(self, parts: Sequence[AdaptedPart], given: Tensor, output: Tensor) -> None:
        others = self._others[: len(given)]
        for part in parts:
            a, b = part.table.a, part.table.b
            inner = (given @ a.flatten(0, 1).t()).view(len(given), *a.shape[:2])
            # Not by a factor of 0: another adapter may make the token infinite.
            inner = inner.masked_fill(others, 0).flatten(1)
            output[:, part.outputs].addmm_(inner, b.flatten(0, 1))
