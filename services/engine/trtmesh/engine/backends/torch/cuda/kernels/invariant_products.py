"""Linear layers with results for a row that do not depend on the other rows, to the last bit.

Every launch has the same tiles, whatever the number of rows: a tile of few rows is filled up with zeros. A program adds
up inputs from the first to the last. Programs may share the inputs, but their number depends on the weight alone, and
their sums are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap
from trtmesh.engine.backends.torch.cuda.kernels.products import LINES, PROGRAMS, shares

ROWS_AT_ONCE = 1024
"""Rows of a launch, whose sums need memory. A multiple of every tile."""
TILES = {2: (64, 64, 4), 4: (32, 32, 3)}
"""By the bytes of a number: rows of a tile, inputs multiplied at once (a divisor of the inputs of a share), and stages
of loads. They fit the shared memory of every GPU with the kernels."""
LEAST_ROWS = min(rows for rows, _, _ in TILES.values())


# One compiled kernel must serve any number of rows.
@triton.jit(do_not_specialize=["rows"])
def _product(
    given,
    matrix,
    bias,
    output,
    partial,
    done,
    rows,
    outputs,
    size,
    line_stride,
    input_stride,
    row_tile: tl.constexpr,
    lines: tl.constexpr,
    depth: tl.constexpr,
    shares: tl.constexpr,
    is_whole: tl.constexpr,
    has_bias: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (`row_tile` rows, `lines` outputs, number below `shares`). The shares divide the inputs."""
    if overlaps:
        gdc_launch_dependents()
    tile = tl.program_id(1)
    share = tl.program_id(2)
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    line = tile * lines + tl.arange(0, lines)
    length = size // shares
    k = share * length + tl.arange(0, depth)
    in_rows = (row < rows)[None, :]
    in_lines = (line < outputs)[:, None]
    place = matrix + line[:, None].to(tl.int64) * line_stride
    place += k[None, :].to(tl.int64) * input_stride
    source = given + row[None, :].to(tl.int64) * size + k[:, None]
    y = tl.zeros((lines, row_tile), tl.float32)
    if overlaps:
        gdc_wait()
    # The weights are the first operand: its least size is 64, that of the second 8.
    for step in range(0, length, depth):
        if is_whole:
            a = tl.load(place, mask=in_lines, other=0.0)
            x = tl.load(source, mask=in_rows, other=0.0)
        else:
            there = step + tl.arange(0, depth) < length
            a = tl.load(place, mask=in_lines & there[None, :], other=0.0)
            x = tl.load(source, mask=in_rows & there[:, None], other=0.0)
        y = tl.dot(a, x, y, input_precision="ieee")
        place += depth * input_stride
        source += depth
    last = True
    if shares > 1:
        index = tl.program_id(0) * tl.num_programs(1) + tile
        spot = tl.arange(0, lines)[:, None] * row_tile + tl.arange(0, row_tile)[None, :]
        theirs = partial + index * shares * lines * row_tile + spot
        tl.store(theirs + share * lines * row_tile, y)
        tl.debug_barrier()
        last = tl.atomic_add(done + index, 1) == shares - 1
        if last:
            y = tl.zeros((lines, row_tile), tl.float32)
            # In order, whichever program is the last. Not from the first-level cache, which may be older.
            for other in tl.static_range(shares):
                y += tl.load(theirs + other * lines * row_tile, cache_modifier=".cg")
            tl.store(done + index, 0)
    if last:
        if has_bias:
            y += tl.load(bias + line, mask=line < outputs, other=0.0).to(tl.float32)[:, None]
        to = output + row[None, :].to(tl.int64) * outputs + line[:, None]
        tl.store(to, y.to(output.dtype.element_ty), mask=in_rows & in_lines)


class InvariantProducts:
    """Products of any number of rows with matrices of any type."""

    def __init__(self, device: torch.device) -> None:
        # Only so few programs share inputs.
        self._partial = torch.empty(PROGRAMS * LINES * ROWS_AT_ONCE, device=device)
        # Zero between launches.
        self._done = torch.zeros(
            PROGRAMS * ROWS_AT_ONCE // LEAST_ROWS, dtype=torch.int32, device=device
        )
        self._options = overlap(device)

    def product(
        self, rows: Tensor, matrix: Tensor, bias: Tensor | None = None, *, shared: int | None = None
    ) -> Tensor:
        """rows [rows, inputs] @ matrix.T, for a matrix [outputs, inputs] in any order, plus `bias` [outputs].

        `shared` programs divide the inputs, by default as many as suit the shape of the matrix.
        """
        given = rows.contiguous()
        output = given.new_empty(len(given), len(matrix))
        shared = shared or shares_of(matrix)
        for first in range(0, len(given), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            self._launch(given[part], matrix, bias, output[part], shared)
        return output

    def _launch(
        self, given: Tensor, matrix: Tensor, bias: Tensor | None, output: Tensor, shared: int
    ) -> None:
        outputs, size = matrix.shape
        row_tile, depth, stages = TILES[matrix.dtype.itemsize]
        _product[(triton.cdiv(len(given), row_tile), triton.cdiv(outputs, LINES), shared)](
            given,
            matrix,
            given if bias is None else bias,
            output,
            self._partial,
            self._done,
            len(given),
            outputs,
            size,
            matrix.stride(0),
            matrix.stride(1),
            row_tile=row_tile,
            lines=LINES,
            depth=depth,
            shares=shared,
            is_whole=size % (shared * depth) == 0,
            has_bias=bias is not None,
            num_warps=4,
            num_stages=stages,
            **self._options,
        )


def shares_of(matrix: Tensor) -> int:
    """Number of programs for the inputs of a matrix [outputs, inputs]."""
    outputs, size = matrix.shape
    return shares(triton.cdiv(outputs, LINES), size)
