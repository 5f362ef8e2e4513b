"""The updates of a step's adapters for devices with results independent of the batch: adapter by adapter, with all
ranks of each slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.model.lora_layers import AdaptedPart, AdapterRows


class SlotBySlot(ABC):
    """Implements Products by a product with independent rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: list[tuple[int, Tensor]] = []

    @abstractmethod
    def _product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """Multiplies `rows` [rows, inputs] with `matrix` [outputs, inputs]."""

    def begin(self, step: Sequence[AdapterRows]) -> None:
        self._step = [(each.slot, torch.tensor(each.rows, device=self._device)) for each in step]

    def add(self, parts: Sequence[AdaptedPart], given: Tensor, output: Tensor) -> None:
        for slot, rows in self._step:
            taken = given.index_select(0, rows)
            for part in parts:
                if part.table.ranks[slot]:
                    inner = self._product(taken, part.table.a[slot])
                    delta = self._product(inner, part.table.b[slot].t())
                    own = output[:, part.outputs]
                    own.index_copy_(0, rows, own.index_select(0, rows).add_(delta))
