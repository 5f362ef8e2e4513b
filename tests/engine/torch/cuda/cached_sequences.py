"""Sequences in a paged cache, for tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.pages import Pages
from trtmesh.engine.backends.torch.model.attention import Rule

LAYERS, LAYER = 2, 1
BLOCK_TOKENS = 5
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PLAIN = Rule(scale=0.3, window=None, softcap=None, sinks=None)


class Cache:
    """Sequences with random blocks of a pool of random KV."""

    def __init__(
        self,
        lengths: list[int],
        kv_heads: int,
        dim: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(sum(lengths))
        width = max(lengths) // BLOCK_TOKENS + 1
        blocks = len(lengths) * width
        shape = (blocks + 1, LAYERS, 2, kv_heads, BLOCK_TOKENS, dim)
        self.pages = Pages(torch.randn(shape, device=device, dtype=dtype))
        self.pages.pool[0] = 0
        self.table = (torch.randperm(blocks, device=device) + 1).view(len(lengths), width)
        self.width = torch.tensor([width], device=device)
        self.positions = torch.tensor(lengths, device=device)

    def stored(self, row: int) -> Tensor:
        """The key and value [2, kv_heads, dim] at the position of a row."""
        position = int(self.positions[row])
        block = int(self.table[row, position // BLOCK_TOKENS])
        return self.pages.pool[block, LAYER, :, :, position % BLOCK_TOKENS]


def rule(name: str, heads: int, device: torch.device) -> Rule:
    return {
        "plain": PLAIN,
        "window": Rule(0.3, 7, None, None),
        "softcap": Rule(0.3, None, 2.0, None),
        "sinks": Rule(0.3, None, None, torch.linspace(-1, 3, heads, device=device)),
        "all": Rule(0.3, 300, 4.0, torch.linspace(-1, 3, heads, device=device)),
    }[name]


def close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    difference = (got.double() - expected.double()).norm() / expected.double().norm()
    # Refuses NaN too.
    return bool(difference <= CLOSE[dtype])
