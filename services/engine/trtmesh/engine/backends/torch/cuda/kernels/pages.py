"""The paged cache, addressed by kernels, and the store of new keys and values there."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap


@dataclass(frozen=True, slots=True)
class Pages:
    """The pool [blocks, layers, 2, kv_heads, tokens of a block, dim], contiguous."""

    pool: Tensor

    @property
    def kv_heads(self) -> int:
        return self.pool.shape[3]

    @property
    def block_tokens(self) -> int:
        return self.pool.shape[4]

    @property
    def dim(self) -> int:
        return self.pool.shape[5]

    def strides(self, layer: int) -> tuple[int, int, int, int]:
        """From the pool's begin to the layer, from a block to the next, from a key to the value of the same token, and
        from a head to the next."""
        block, of_layer, value, head, *_ = self.pool.stride()
        return layer * of_layer, block, value, head


@dataclass(frozen=True, slots=True)
class TableRows:
    """Tokens of sequences, on the device."""

    positions: Tensor
    """[tokens]"""
    owners: Tensor
    """The rows of the table with their blocks, [tokens]."""
    table: Tensor
    """Of `width` [1] blocks a row."""
    width: Tensor


@triton.jit
def _store(
    kv,
    positions,
    owners,
    table,
    width,
    pool,
    layer_offset,
    block_stride,
    head_stride,
    kv_row,
    kv_head,
    count: tl.constexpr,
    padded_count: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: a row. A token's values follow the keys, at the distance of a head."""
    if overlaps:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    owner = tl.load(owners + row)
    block = tl.load(table + owner * tl.load(width) + position // block_tokens)
    if overlaps:
        gdc_wait()
    # Rows without a sequence have the null block, always zero.
    if block != 0:
        h = tl.arange(0, padded_count)
        d = tl.arange(0, padded_dim)
        there = (h < count)[:, None] & (d < dim)[None, :]
        numbers = tl.load(
            kv + row * kv_row + h[:, None] * kv_head + d[None, :], mask=there, other=0.0
        )
        place = pool + layer_offset + block * block_stride + (position % block_tokens) * dim
        to = place + h[:, None] * head_stride + d[None, :]
        tl.store(to, numbers.to(pool.dtype.element_ty), mask=there)


def store_tokens(kv: Tensor, tokens: TableRows, pages: Pages, layer: int) -> None:
    """Stores `kv` [tokens, 2 * kv_heads, dim]; nothing for tokens with the null block."""
    rows, count, dim = kv.shape
    offset, block, _, head = pages.strides(layer)
    _store[(rows,)](
        kv,
        tokens.positions,
        tokens.owners,
        tokens.table,
        tokens.width,
        pages.pool,
        offset,
        block,
        head,
        kv.stride(0),
        kv.stride(1),
        count=count,
        padded_count=triton.next_power_of_2(count),
        dim=dim,
        padded_dim=triton.next_power_of_2(dim),
        block_tokens=pages.block_tokens,
        **overlap(kv.device),
    )
