"""Any other device of PyTorch. Attention gathers as on a CPU: there is no kernel for pages yet."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trtmesh.engine.backends.torch.compute.device import Compute, Device
from trtmesh.engine.backends.torch.compute.paged_attention import PagedAttention
from trtmesh.engine.backends.torch.compute.runner import Runner
from trtmesh.engine.backends.torch.compute.slot_products import SlotProducts
from trtmesh.engine.backends.torch.memory.blocks import BlockTables
from trtmesh.engine.backends.torch.memory.kvcache import KvCache
from trtmesh.engine.backends.torch.model.lora_layers import Products, UpdateTable
from trtmesh.engine.backends.torch.model.model import Fitted, Model
from trtmesh.engine.backends.torch.sampling.choice import Chooser
from trtmesh.engine.backends.torch.sampling.ordering import Ordering

FRACTION = 0.9
"""Share of the free memory that the KV cache takes by default."""


class Accelerator(Device):
    """Runs the modules of transformers as they are."""

    pins_memory = True
    shares_memory = False
    default_dtype = None

    def fit(self, module: PreTrainedModel, dtype: torch.dtype) -> Fitted:
        return Fitted(dtype)

    def products(self, tables: Collection[UpdateTable], max_tokens: int) -> Products:
        return SlotProducts(tables, max_tokens)

    def compute(self, model: Model, cache: KvCache, tables: BlockTables) -> Compute:
        attention = PagedAttention(
            cache, tables, model.compute_dtype, decode_copy_bytes=0, uses_fused=lambda _: True
        )
        chooser = Chooser(ORDERING)
        synchronize = partial(torch.cuda.synchronize, self.name)
        return Runner(model, cache, tables, attention, chooser, torch.cuda.empty_cache, synchronize)

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.name)[0])

    def default_cache_bytes(self) -> int:
        return int(FRACTION * self.free_memory())

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
