"""The paged cache, addressed by kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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

    @property
    def block_stride(self) -> int:
        return self.pool.stride(0)

    @property
    def value_stride(self) -> int:
        """From a key to the value of the same token."""
        return self.pool.stride(2)

    @property
    def head_stride(self) -> int:
        return self.pool.stride(3)

    def layer_offset(self, layer: int) -> int:
        return layer * self.pool.stride(1)


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
