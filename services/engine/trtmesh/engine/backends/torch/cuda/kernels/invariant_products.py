"""Linear layers with results for a row that do not depend on the other rows, to the last bit.

The inputs are divided into shares, whose number depends on the weight alone. Each share is added up from the first
input to the last, and the sums of the shares in order. Tiles of few rows leave the shares to several programs, to fill
the GPU; tiles of many rows take all shares one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap
from trtmesh.engine.backends.torch.cuda.kernels.products import (
    LINES,
    PROGRAMS,
    SHARED_MEMORY,
    shared_memory,
    shares,
)

SHARED_ROWS = 256
"""Most rows of a launch with shared inputs: the programs' sums need memory."""
LEAST_ROWS = 16
"""Of a tile."""


# One compiled kernel must serve any number of rows.
@triton.jit(do_not_specialize=["rows"])
def _product(
    given,
    matrix,
    bias,
    added,
    output,
    partial,
    done,
    rows,
    outputs,
    line_stride,
    input_stride,
    size: tl.constexpr,
    row_tile: tl.constexpr,
    lines: tl.constexpr,
    depth: tl.constexpr,
    shares: tl.constexpr,
    alone: tl.constexpr,
    is_whole: tl.constexpr,
    fills_lines: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (`row_tile` rows, `lines` outputs, number below `shares`). The shares divide the inputs. With `alone` a
    program computes all shares, one after another."""
    if overlaps:
        gdc_launch_dependents()
    tile = tl.program_id(1)
    row = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    line = tile * lines + tl.arange(0, lines)
    length: tl.constexpr = size // shares
    in_rows = (row < rows)[None, :]
    in_lines = (line < outputs)[:, None]
    if fills_lines:
        in_lines = tl.full((lines, 1), 1, tl.int1)
    begin = 0
    if not alone:
        begin = tl.program_id(2) * length
    k = begin + tl.arange(0, depth)
    place = matrix + line[:, None].to(tl.int64) * line_stride
    place += k[None, :].to(tl.int64) * input_stride
    second = outputs.to(tl.int64) * line_stride
    source = given + row[None, :].to(tl.int64) * size + k[:, None]
    if overlaps:
        gdc_wait()
    y = tl.zeros((lines, row_tile), tl.float32)
    z = tl.zeros((lines, row_tile), tl.float32)
    all_y = tl.zeros((lines, row_tile), tl.float32)
    all_z = tl.zeros((lines, row_tile), tl.float32)
    # The weights are the first operand, of at least 64 lines; the second has at least 8.
    for step in range(0, size if alone else length, depth):
        there = step + tl.arange(0, depth) < length
        in_first, in_second = in_lines, in_rows
        if not is_whole:
            in_first, in_second = in_lines & there[None, :], in_rows & there[:, None]
        a = tl.load(place, mask=in_first, other=0.0)
        x = tl.load(source, mask=in_second, other=0.0)
        y = tl.dot(a, x, y, input_precision="ieee")
        if gated:
            b = tl.load(place + second, mask=in_first, other=0.0)
            z = tl.dot(b, x, z, input_precision="ieee")
        place += depth * input_stride
        source += depth
        # Known when compiled, the first condition spares the second.
        if alone and shares > 1:  # noqa: SIM102
            if (step + depth) % length == 0:
                all_y += y
                y = tl.zeros((lines, row_tile), tl.float32)
                if gated:
                    all_z += z
                    z = tl.zeros((lines, row_tile), tl.float32)
    if alone and shares > 1:
        y, z = all_y, all_z
    last = True
    if shares > 1 and not alone:
        own = tl.program_id(2)
        index = tl.program_id(0) * tl.num_programs(1) + tile
        spot = tl.arange(0, lines)[:, None] * row_tile + tl.arange(0, row_tile)[None, :]
        wide: tl.constexpr = lines * row_tile * (2 if gated else 1)
        theirs = partial + index * shares * wide + spot
        tl.store(theirs + own * wide, y)
        if gated:
            tl.store(theirs + own * wide + lines * row_tile, z)
        tl.debug_barrier()
        last = tl.atomic_add(done + index, 1) == shares - 1
        if last:
            # In order, by any program as the last. Not from the first-level cache, perhaps older.
            y = tl.load(theirs, cache_modifier=".cg")
            if gated:
                z = tl.load(theirs + lines * row_tile, cache_modifier=".cg")
            for other in tl.static_range(1, shares):
                y += tl.load(theirs + other * wide, cache_modifier=".cg")
                if gated:
                    z += tl.load(theirs + other * wide + lines * row_tile, cache_modifier=".cg")
            tl.store(done + index, 0)
    if last:
        kind = output.dtype.element_ty
        if has_bias:
            y += tl.load(bias + line, mask=line < outputs, other=0.0).to(tl.float32)[:, None]
        # Rounded wherever separate operations would round.
        y = y.to(kind).to(tl.float32)
        if gated:
            if has_bias:
                z += tl.load(bias + outputs + line, mask=line < outputs, other=0.0).to(tl.float32)[
                    :, None
                ]
            y = y / (1.0 + tl.exp(-y)) * z.to(kind).to(tl.float32)
        to = row[None, :].to(tl.int64) * outputs + line[:, None]
        if adds:
            y = y.to(kind).to(tl.float32)
            y += tl.load(added + to, mask=in_rows & in_lines, other=0.0).to(tl.float32)
        tl.store(output + to, y.to(kind), mask=in_rows & in_lines)


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a program. Any value gives the same results."""

    rows: int
    lines: int
    depth: int
    """Inputs multiplied at once."""
    stages: int
    """Of loads."""
    warps: int
    alone: bool = False
    """Whether a program computes all shares of the inputs."""


Tiles = tuple[tuple[int | None, Tile], ...]

MANY = Tile(128, 128, 64, 3, 8, alone=True)
SMALL = (
    (16, Tile(16, 64, 64, 4, 4)),
    (64, Tile(64, 64, 64, 4, 4)),
    (SHARED_ROWS, Tile(64, 128, 64, 4, 4)),
    (None, MANY),
)
"""For up to so many rows of half-precision numbers, in the shared memory of every GPU with the kernels."""
LARGE = (
    (16, Tile(16, 64, 128, 4, 4)),
    (32, Tile(32, 64, 128, 4, 4)),
    (64, Tile(64, 64, 128, 4, 4)),
    (SHARED_ROWS, Tile(128, 64, 128, 3, 4)),
    (None, MANY),
)
"""The same where a program may have SHARED_MEMORY."""
LARGE_SHARED = (
    (16, Tile(16, 64, 256, 3, 4)),
    (32, Tile(32, 64, 256, 3, 4)),
    *LARGE[2:4],
    (512, Tile(64, 64, 128, 3, 4, alone=True)),
    (None, MANY),
)
"""And for products with shares: more loads at once, as fewer programs run."""
FLOAT32 = (
    (SHARED_ROWS, Tile(32, 64, 32, 3, 4)),
    (None, Tile(32, 64, 32, 3, 4, alone=True)),
)


class InvariantProducts:
    """Products of any number of rows with matrices of any type."""

    def __init__(self, device: torch.device) -> None:
        # Only so few programs share inputs.
        self._partial = torch.empty(PROGRAMS * 2 * LINES * SHARED_ROWS, device=device)
        # Zero between launches.
        self._done = torch.zeros(
            PROGRAMS * SHARED_ROWS // LEAST_ROWS, dtype=torch.int32, device=device
        )
        self._options = overlap(device)
        self._has_room = shared_memory(device) >= SHARED_MEMORY

    def product(
        self,
        rows: Tensor,
        matrix: Tensor,
        bias: Tensor | None = None,
        *,
        added: Tensor | None = None,
        gated: bool = False,
        shared: int | None = None,
    ) -> Tensor:
        """rows [rows, inputs] @ matrix.T, for a matrix [outputs, inputs] in any order, plus `bias` [outputs]; then silu
        (first half of the outputs) * second half where `gated`, and plus `added`, each rounded as by its own operation.

        `shared` sums are added up, of a part of the inputs each; by default as many as suit the shape of the matrix.
        """
        given = rows.contiguous()
        outputs = len(matrix) // 2 if gated else len(matrix)
        output = given.new_empty(len(given), outputs)
        shared = shared or shares_of(matrix)
        tiles: Tiles = FLOAT32 if matrix.dtype.itemsize > 2 else SMALL
        if tiles is SMALL and self._has_room:
            tiles = LARGE_SHARED if shared > 1 and not gated else LARGE
        tile = next(tile for most, tile in tiles if most is None or len(given) <= most)
        if len(given):
            self._launch(given, matrix, bias, added, output, shared, tile, gated=gated)
        return output

    def _launch(
        self,
        given: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        added: Tensor | None,
        output: Tensor,
        shared: int,
        tile: Tile,
        *,
        gated: bool,
    ) -> None:
        size, outputs = matrix.shape[1], output.shape[1]
        # Two sums need the registers of twice as many lines.
        lines = min(tile.lines, LINES) if gated else tile.lines
        programs = (
            triton.cdiv(len(given), tile.rows),
            triton.cdiv(outputs, lines),
            1 if tile.alone else shared,
        )
        _product[programs](
            given,
            matrix,
            given if bias is None else bias,
            given if added is None else added.contiguous(),
            output,
            self._partial,
            self._done,
            len(given),
            outputs,
            matrix.stride(0),
            matrix.stride(1),
            size=size,
            row_tile=tile.rows,
            lines=lines,
            depth=tile.depth,
            shares=shared,
            alone=tile.alone,
            is_whole=size % (shared * tile.depth) == 0,
            fills_lines=outputs % lines == 0,
            has_bias=bias is not None,
            adds=added is not None,
            gated=gated,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **self._options,
        )


def shares_of(matrix: Tensor) -> int:
    """Number of sums of a part of the inputs each, for a matrix [outputs, inputs]."""
    outputs, size = matrix.shape
    return shares(triton.cdiv(outputs, LINES), size)
