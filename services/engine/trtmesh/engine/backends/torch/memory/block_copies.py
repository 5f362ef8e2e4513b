"""Copies of blocks from one tensor to another, by operations of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class CopiesBlocks(Protocol):
    """A device's way to copy blocks in its memory, and between it and pinned host memory."""

    def __call__(
        self, source: Tensor, target: Tensor, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copies block `sources[i]` of `source` to block `targets[i]` of `target`, for every i, on the current stream.

        Both are [blocks, ...] of one type, each block contiguous. No target occurs twice, or is a source too.
        """


def copy_blocks(
    source: Tensor, target: Tensor, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Implements CopiesBlocks for every device: between two devices, the content is gathered and waited for."""
    content = source.index_select(0, indexes(sources, source.device))
    target.index_copy_(0, indexes(targets, target.device), content.to(target.device))


def indexes(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers on a device, which need not be waited for."""
    pinned = device.type == "cuda"
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned)
    return host.to(device, non_blocking=True)
