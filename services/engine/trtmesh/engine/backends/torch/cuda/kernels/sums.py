"""Running sums of rows, in an order that does not depend on the number of rows, as that of PyTorch does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap

COLUMNS = 1024
"""Numbers that a program adds up at once."""


@triton.jit
def _running_sums(given, output, size, columns: tl.constexpr, overlaps: tl.constexpr):
    """Program: a row."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, columns)
    before = tl.zeros((1,), tl.float64)
    for first in range(0, size, columns):
        there = first + i < size
        numbers = tl.load(given + row * size + first + i, mask=there, other=0.0)
        sums = tl.cumsum(numbers, 0) + before
        tl.store(output + row * size + first + i, sums, mask=there)
        before = tl.zeros((1,), tl.float64) + tl.sum(tl.where(i == columns - 1, sums, 0.0), 0)


def running_sums(rows: Tensor) -> Tensor:
    """The sums of each row up to each of its numbers, for `rows` [rows, any number] float64."""
    given = rows.contiguous()
    output = torch.empty_like(given)
    _running_sums[(len(given),)](
        given, output, given.shape[1], columns=COLUMNS, **overlap(given.device)
    )
    return output
