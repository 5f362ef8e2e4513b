"""The CPU as a device."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from trtmesh.chassis.cores import physical_cores, threads_for
from trtmesh.engine.backends.torch.compute.device import Compute, Device
from trtmesh.engine.backends.torch.compute.memory_probe import StepSize
from trtmesh.engine.backends.torch.compute.paged_attention import PagedAttention
from trtmesh.engine.backends.torch.compute.runner import Runner
from trtmesh.engine.backends.torch.compute.tiled_attention import TiledAttention
from trtmesh.engine.backends.torch.cpu.grouped_products import GroupedProducts
from trtmesh.engine.backends.torch.cpu.invariance import TiledProducts, make_invariant
from trtmesh.engine.backends.torch.cpu.linears import lacks_instructions, pack_linears, widen
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.attention import Attention
from trtmesh.engine.backends.torch.model.fused_layers import FusedNorm, Rotation
from trtmesh.engine.backends.torch.model.fusing import fuse_layers, fuse_norms, is_plain
from trtmesh.engine.backends.torch.model.lora_layers import Products, UpdateTable
from trtmesh.engine.backends.torch.model.model import Fitted, Model
from trtmesh.engine.backends.torch.parallel.group import RankGroup
from trtmesh.engine.backends.torch.parallel.layers import add_up
from trtmesh.engine.backends.torch.sampling.choice import Chooser
from trtmesh.engine.backends.torch.sampling.ordering import Ordering
from trtmesh.engine.backends.torch.settings import TorchSettings

CACHE_BYTES = 2**30
DECODE_COPY_BYTES = 2**30
"""Most memory for contiguous copies of the KV of decoding sequences, instead of gathering blocks in every step."""
TOP_BLOCK = 32
TOP_SHARE = 500
"""In rows with more numbers than this for each of the top, blocks are compared by their maxima first."""
MANY_HEADS = 16
FEW_QUERIES = 16
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class Cpu(Device):
    """Computes in float32 with fused layers, packed weights and copies of KV; orders numbers with numpy."""

    pins_memory = False
    shares_memory = True
    default_dtype = torch.float32

    def __init__(self, settings: TorchSettings, group: RankGroup | None = None) -> None:
        """`group` are the ranks of a divided model; None for a whole model."""
        super().__init__(torch.device("cpu"))
        self._settings = settings
        self._group = group

    def fit(self, module: PreTrainedModel, dtype: torch.dtype) -> Fitted:
        wide = lacks_instructions(dtype)
        fuse_layers(module, Rotation())
        if wide:
            widen(module)
        else:
            pack_linears(module)
        fuse_norms(module, FusedNorm)
        compute_dtype = torch.float32 if wide else dtype
        if self._settings.batch_invariant:
            make_invariant(module, compute_dtype)
        if self._group:
            add_up(module, self._group)
        return Fitted(compute_dtype, plain=is_plain(module))

    def products(self, tables: Collection[UpdateTable], max_tokens: int) -> Products:
        return TiledProducts(tables) if self._settings.batch_invariant else GroupedProducts()

    def compute(
        self,
        model: Model,
        cache: KvCache,
        tables: BlockTables,
        most_tokens: int,
        *,
        drafts: bool = False,
    ) -> Compute:
        attention = self._attention(model, cache, tables)
        return Runner(model, cache, tables, attention, Chooser(ORDERING), _nothing)

    def _attention(self, model: Model, cache: KvCache, tables: BlockTables) -> Attention:
        if self._settings.batch_invariant:
            return TiledAttention(cache, tables)
        return PagedAttention(
            cache,
            tables,
            model.compute_dtype,
            decode_copy_bytes=DECODE_COPY_BYTES,
            uses_fused=fused_is_faster,
        )

    def spare_memory(self, model: Model, largest: StepSize) -> int:
        return free_memory() // (self._group.place.ranks if self._group else 1)

    def default_cache_bytes(self, model: Model, largest: StepSize) -> int:
        return CACHE_BYTES

    def allocated_bytes(self) -> int:
        return 0


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes left on the machine, within the container's limit."""
    available = next(
        int(line.split()[1]) * 1024
        for line in meminfo.read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(0, available)


def fused_is_faster(queries: Tensor) -> bool:
    """The fused kernel computes head after head: slow for many heads with few queries each. Batched products are faster
    there, but only in float32."""
    sequences, kv_heads, rows, _ = queries.shape
    if queries.dtype != torch.float32:
        return True
    return sequences * kv_heads < MANY_HEADS or rows > FEW_QUERIES


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """numpy finds them several times faster than PyTorch."""
    values = logits.numpy()
    places = values.argmax(axis=1)
    return torch.from_numpy(values[np.arange(len(values)), places]), torch.from_numpy(places)


def descending(rows: Tensor) -> Tensor:
    """numpy sorts ten times faster than PyTorch."""
    return -torch.from_numpy(np.sort(-rows.numpy(), axis=1))


def top(rows: Tensor, count: int) -> Tensor:
    """numpy partitions several times faster than PyTorch. In long rows, only the `count` blocks with the highest maxima
    can hold the top."""
    values, size = rows.numpy(), rows.shape[1]
    if size > TOP_SHARE * count:
        end = size - size % TOP_BLOCK
        blocks = rows[:, :end].reshape(len(rows), -1, TOP_BLOCK)
        highest = np.argpartition(blocks.amax(dim=2).numpy(), -count, axis=1)[:, -count:]
        kept = np.take_along_axis(blocks.numpy(), highest[..., None], axis=1)
        values = np.concatenate((kept.reshape(len(rows), -1), values[:, end:]), axis=1)
    return descending(torch.from_numpy(np.partition(values, -count, axis=1)[:, -count:]))


ORDERING = Ordering(highest, top, descending, looks_ahead=True)


def _nothing() -> None:
    """The CPU's allocator keeps no memory."""


def take_threads(threads: int, weights: int, *, engines: int = 1) -> None:
    """Sets `threads`; 0 means OMP_NUM_THREADS, as in torch itself, or the best number for so many bytes of weights,
    divided among `engines` like the cores."""
    if threads or "OMP_NUM_THREADS" not in os.environ:
        cores = physical_cores() // engines
        torch.set_num_threads(threads or threads_for(weights // engines, cores))
