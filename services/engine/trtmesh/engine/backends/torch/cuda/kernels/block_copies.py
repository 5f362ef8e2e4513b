"""Copies of blocks in one kernel, also from and to pinned host memory, within a GPU's reach.

Copies of single blocks by the driver cost host time for each block; a gathered run costs memory and a second copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from trtmesh.engine.backends.torch.memory.kvcache import indexes

PART = 1024
"""Words of a program."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy(source, target, sources, targets, source_stride, target_stride, size, part: tl.constexpr):
    """Program: (block, part of the block's words)."""
    place = tl.program_id(0)
    given = tl.load(sources + place) * source_stride
    taken = tl.load(targets + place) * target_stride
    at = tl.program_id(1) * part + tl.arange(0, part)
    there = at < size
    words = tl.load(source + given + at, mask=there)
    tl.store(target + taken + at, words, mask=there)


def copy_blocks(
    source: Tensor, target: Tensor, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Implements CopiesBlocks; the reference is `memory.kvcache.copy_blocks`."""
    if not sources:
        return
    device = source.device if source.is_cuda else target.device
    numbers = indexes([*sources, *targets], device)
    given, taken = _words(source.flatten(1), target.flatten(1))
    size = given.shape[1]
    _copy[(len(sources), triton.cdiv(size, PART))](
        given,
        taken,
        numbers[: len(sources)],
        numbers[len(sources) :],
        given.stride(0),
        taken.stride(0),
        size,
        part=PART,
    )


def _words(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Views the rows [blocks, bytes] as the widest words for both."""
    rows = source.view(torch.uint8), target.view(torch.uint8)
    places = [rows[0].shape[1]]
    for each in rows:
        places += [each.stride(0), each.data_ptr()]
    word = next(word for word in WORDS if all(place % word.itemsize == 0 for place in places))
    return rows[0].view(word), rows[1].view(word)
