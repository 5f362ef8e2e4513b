"""Any other device of PyTorch. Attention gathers as on a CPU: there is no kernel for pages yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.compute.device import Compute, Device
from trtmesh.engine.backends.torch.compute.memory_probe import StepSize, probe
from trtmesh.engine.backends.torch.compute.paged_attention import PagedAttention
from trtmesh.engine.backends.torch.compute.runner import Runner
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.memory.shortage import LESS_STEP
from trtmesh.engine.backends.torch.model.lora_layers import (
    AdaptedPart,
    AdapterRows,
    Products,
    UpdateTable,
)
from trtmesh.engine.backends.torch.model.model import Fitted, Model
from trtmesh.engine.backends.torch.sampling.choice import Chooser
from trtmesh.engine.backends.torch.sampling.ordering import Ordering

log = logging.getLogger(__name__)

FRACTION = 0.9
"""Share of the spare memory for the KV cache by default."""

KINDS_OF_STEPS = 3
"""Each in separate memory: operation by operation, and the two kinds of graphs of `cuda/`."""
WORKSPACES = 2**29
"""Bytes shared by steps: code of kernels, workspaces of libraries, tables, gaps between allocations."""


class Accelerator(Device):
    """Runs the modules of transformers as they are."""

    pins_memory = True
    shares_memory = False
    default_dtype = None

    def fit(self, module: PreTrainedModel, dtype: torch.dtype) -> Fitted:
        return Fitted(dtype)

    def products(self, tables: Collection[UpdateTable], max_tokens: int) -> Products:
        return SlotProducts(tables, max_tokens)

    def compute(
        self,
        model: Model,
        cache: KvCache,
        tables: BlockTables,
        most_tokens: int,
        *,
        drafts: bool = False,
    ) -> Compute:
        attention = PagedAttention(
            cache, tables, model.compute_dtype, decode_copy_bytes=0, uses_fused=lambda _: True
        )
        chooser = Chooser(ORDERING)
        synchronize = partial(torch.cuda.synchronize, self.name)
        return Runner(model, cache, tables, attention, chooser, self.release_memory, synchronize)

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.name)[0])

    def spare_memory(self, model: Model, largest: StepSize) -> int:
        peak = self.peak_of(partial(probe, model, largest, self.name))
        self.release_memory()
        free = self.free_memory()
        taken = KINDS_OF_STEPS * peak + WORKSPACES + self._kept_bytes(model, largest)
        if free <= taken:
            raise ModelUnusable(
                f"the model leaves {free >> 20} MiB free on {self.name}, and steps take {taken >> 20} MiB, so there is"
                f" no room for a KV cache; lower {LESS_STEP}, or take another device, dtype or model"
            )
        log.info("of %d MiB free on %s, steps take %d MiB", free >> 20, self.name, taken >> 20)
        return free - taken

    def _kept_bytes(self, _model: Model, _largest: StepSize) -> int:
        """Memory kept for good by results of steps."""
        return 0

    def peak_of(self, compute: Callable[[], object]) -> int:
        """Most bytes of an operation's tensors at once."""
        torch.cuda.reset_peak_memory_stats(self.name)
        before = torch.cuda.memory_allocated(self.name)
        compute()
        return torch.cuda.max_memory_allocated(self.name) - before

    def release_memory(self) -> None:
        """Returns memory kept by PyTorch for later allocations to the device."""
        torch.cuda.empty_cache()

    def default_cache_bytes(self, model: Model, largest: StepSize) -> int:
        return int(FRACTION * self.spare_memory(model, largest))

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.name)


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    peaks, ids = logits.max(dim=1)
    return peaks, ids


def _top(rows: Tensor, count: int) -> Tensor:
    return rows.topk(count, dim=1).values


def _descending(rows: Tensor) -> Tensor:
    return rows.sort(dim=1, descending=True).values


ORDERING = Ordering(_highest, _top, _descending, looks_ahead=False)


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
