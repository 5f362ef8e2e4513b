"""Linear layers of few rows, with the norm before and the activation or sum after.

With few rows, a product takes as long as reading the weights. These kernels begin to read while the previous kernel
still runs, and need no kernels for norm, activation and sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.layers import Scale
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap
from trtmesh.engine.backends.torch.cuda.kernels.updates import (
    Inner,
    Updates,
    rank_of,
    row_arguments,
    row_factors,
    row_inner,
    row_update,
)

MOST_ROWS = 64
VALUES = 64
"""Weights of a thread of a product of one row."""
WIDEST = 16384
"""Weights of a line read at once."""
LINES = 64
"""Outputs of a program of a product of several rows: also a divisor of the outputs."""
DEPTH = 128
"""Inputs of a program multiplied at once: also a divisor of the inputs."""
PROGRAMS = 132
"""Programs to fill a large GPU: one for each multiprocessor."""
LEAST_SHARE = 512
"""Inputs of a program, where several share the inputs."""
MOST_SHARES = 8
SHARED_MEMORY = 220_000
"""Most bytes for a program of a product of several rows."""


@triton.jit
def _one_row(
    given,
    weight,
    output,
    scale,
    added,
    inner,
    first_b,
    second_b,
    third_b,
    first_ranks,
    second_ranks,
    third_ranks,
    tiles,
    first_outputs,
    second_outputs,
    third_outputs,
    most_rank,
    epsilon,
    outputs,
    size,
    lines: tl.constexpr,
    columns: tl.constexpr,
    steps: tl.constexpr,
    has_norm: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    shares: tl.constexpr,
    padded_shares: tl.constexpr,
    tile_rows: tl.constexpr,
    ranks: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: `lines` outputs. With `shares` of its inner product, the update of an adapter is added."""
    if overlaps:
        gdc_launch_dependents()
    line = tl.program_id(0) * lines + tl.arange(0, lines)
    at = tl.arange(0, columns)
    place = weight + line[:, None].to(tl.int64) * size + at[None, :]
    there = (line < outputs)[:, None] & (at < size)[None, :]
    second = outputs.to(tl.int64) * size
    a = tl.load(place, mask=there, other=0.0)
    if gated:
        b = tl.load(place + second, mask=there, other=0.0)
    if has_norm:
        s = tl.load(scale + at, mask=at < size, other=0.0)
    if shares:
        slot = tl.load(tiles)
        part = 0
        n = line
        wide = first_outputs
        if not gated:
            begin = tl.program_id(0) * lines
            third = first_outputs + second_outputs
            part = (begin >= first_outputs).to(tl.int32) + (begin >= third).to(tl.int32)
            n = line - tl.where(part == 2, third, tl.where(part == 1, first_outputs, 0))
            wide = tl.where(
                part == 2, third_outputs, tl.where(part == 1, second_outputs, first_outputs)
            )
        rank = rank_of(part, slot, first_ranks, second_ranks, third_ranks)
        factors = row_factors(
            n, part, slot, 0, rank, first_b, second_b, third_b, wide, most_rank, shares,
            padded_shares, ranks,
        )  # fmt: skip
        if gated:
            up_rank = rank_of(1, slot, first_ranks, second_ranks, third_ranks)
            up_factors = row_factors(
                n, 1, slot, 0, up_rank, first_b, second_b, third_b, wide, most_rank, shares,
                padded_shares, ranks,
            )  # fmt: skip
    if overlaps:
        gdc_wait()
    x = tl.load(given + at, mask=at < size, other=0.0).to(tl.float32)
    if shares:
        inners = row_inner(inner, part, 0, rank, most_rank, shares, padded_shares, tile_rows, ranks)
        if gated:
            up_inners = row_inner(
                inner, 1, 0, up_rank, most_rank, shares, padded_shares, tile_rows, ranks
            )
    squares = tl.sum(x * x, 0)
    if has_norm:
        x = x * s
    y = tl.sum(a.to(tl.float32) * x[None, :], 1)
    if gated:
        z = tl.sum(b.to(tl.float32) * x[None, :], 1)
    for step in tl.static_range(1, steps):
        here = step * columns + at
        more = (line < outputs)[:, None] & (here < size)[None, :]
        x = tl.load(given + here, mask=here < size, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 0)
        if has_norm:
            x = x * tl.load(scale + here, mask=here < size, other=0.0)
        a = tl.load(place + step * columns, mask=more, other=0.0)
        y += tl.sum(a.to(tl.float32) * x[None, :], 1)
        if gated:
            b = tl.load(place + second + step * columns, mask=more, other=0.0)
            z += tl.sum(b.to(tl.float32) * x[None, :], 1)
    if shares:
        y += row_update(factors, inners)
        for run in range(ranks, rank, ranks):
            factors = row_factors(
                n, part, slot, run, rank, first_b, second_b, third_b, wide, most_rank, shares,
                padded_shares, ranks,
            )  # fmt: skip
            inners = row_inner(
                inner, part, run, rank, most_rank, shares, padded_shares, tile_rows, ranks
            )
            y += row_update(factors, inners)
        if gated:
            z += row_update(up_factors, up_inners)
            for run in range(ranks, up_rank, ranks):
                up_factors = row_factors(
                    n, 1, slot, run, up_rank, first_b, second_b, third_b, wide, most_rank, shares,
                    padded_shares, ranks,
                )  # fmt: skip
                up_inners = row_inner(
                    inner, 1, run, up_rank, most_rank, shares, padded_shares, tile_rows, ranks
                )
                z += row_update(up_factors, up_inners)
    if has_norm:
        length = tl.rsqrt(squares / size + epsilon)
        y = y * length
        if gated:
            z = z * length
    if gated:
        y = y / (1.0 + tl.exp(-y)) * z
    if adds:
        y += tl.load(added + line, mask=line < outputs, other=0.0).to(tl.float32)
    tl.store(output + line, y.to(output.dtype.element_ty), mask=line < outputs)


@triton.jit
def _few_rows(
    given,
    weight,
    output,
    added,
    partial,
    done,
    rows,
    outputs,
    size: tl.constexpr,
    padded_rows: tl.constexpr,
    lines: tl.constexpr,
    depth: tl.constexpr,
    shares: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (`lines` outputs, number below `shares`). The shares divide the inputs."""
    if overlaps:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    share = tl.program_id(1)
    begin = share * (size // shares)
    line = tile * lines + tl.arange(0, lines)
    row = tl.arange(0, padded_rows)
    k = begin + tl.arange(0, depth)
    place = weight + line[:, None].to(tl.int64) * size + k[None, :]
    second = outputs.to(tl.int64) * size
    source = given + row[None, :] * size + k[:, None]
    in_rows = (row < rows)[None, :]
    y = tl.zeros((lines, padded_rows), tl.float32)
    z = tl.zeros((lines, padded_rows), tl.float32)
    if overlaps:
        gdc_wait()
    # The weights are the first operand: its least size is 64, that of the second 8.
    for step in range(0, size // shares, depth):
        a = tl.load(place + step)
        x = tl.load(source + step, mask=in_rows, other=0.0)
        y = tl.dot(a, x, y, input_precision="ieee")
        if gated:
            b = tl.load(place + second + step)
            z = tl.dot(b, x, z, input_precision="ieee")
    last = True
    if shares > 1:
        own = tl.arange(0, lines)[:, None] * padded_rows + row[None, :]
        wide: tl.constexpr = lines * padded_rows * (2 if gated else 1)
        mine = partial + (tile * shares + share) * wide
        tl.store(mine + own, y)
        if gated:
            tl.store(mine + lines * padded_rows + own, z)
        tl.debug_barrier()
        last = tl.atomic_add(done + tile, 1) == shares - 1
        if last:
            y = tl.zeros((lines, padded_rows), tl.float32)
            z = tl.zeros((lines, padded_rows), tl.float32)
            # In order, whichever program is the last. Not from the first-level cache, which may be older.
            for other in tl.static_range(shares):
                theirs = partial + (tile * shares + other) * wide + own
                y += tl.load(theirs, cache_modifier=".cg")
                if gated:
                    z += tl.load(theirs + lines * padded_rows, cache_modifier=".cg")
            tl.store(done + tile, 0)
    if last:
        if gated:
            y = y / (1.0 + tl.exp(-y)) * z
        spot = row[None, :].to(tl.int64) * outputs + line[:, None]
        if adds:
            y += tl.load(added + spot, mask=in_rows, other=0.0).to(tl.float32)
        tl.store(output + spot, y.to(output.dtype.element_ty), mask=in_rows)


class FewRows:
    """Products of up to MOST_ROWS rows with half-precision weights."""

    def __init__(self, device: torch.device) -> None:
        most = PROGRAMS * 2 * LINES * MOST_ROWS
        self._partial = torch.empty(most, device=device)
        # Zero between launches.
        self._done = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self._options = overlap(device)
        self._has_room = shared_memory(device) >= SHARED_MEMORY

    def takes(self, given: Tensor, weight: Tensor) -> bool:
        """Whether there is a kernel for a product of `given` [rows, inputs] and `weight` [outputs, inputs]."""
        rows, (outputs, size) = len(given), weight.shape
        if weight.dtype.itemsize != 2 or not weight.is_contiguous() or not 0 < rows <= MOST_ROWS:
            return False
        return rows == 1 or (self._has_room and not (outputs % (2 * LINES) or size % DEPTH))

    def product(
        self,
        given: Tensor,
        weight: Tensor,
        *,
        scale: Scale | None = None,
        added: Tensor | None = None,
        gated: bool = False,
        update: tuple[Updates, Inner] | None = None,
    ) -> Tensor:
        """given [rows, inputs] @ weight.T, plus `added`; silu(first half of the outputs) * second half where `gated`.

        A `scale` applies to `given`, and an `update` to the product; they need one row. With both, the update is of
        `given` times the weight of the scale.
        """
        given = given.contiguous()
        rows, outputs = len(given), len(weight)
        output = given.new_empty(rows, outputs // 2 if gated else outputs)
        if rows == 1:
            self._launch_one(given, weight, output, scale, added, update)
        else:
            assert scale is None
            assert update is None
            self._launch_few(given, weight, output, added)
        return output

    def _launch_one(
        self,
        given: Tensor,
        weight: Tensor,
        output: Tensor,
        scale: Scale | None,
        added: Tensor | None,
        update: tuple[Updates, Inner] | None,
    ) -> None:
        size, outputs = given.shape[1], output.shape[1]
        gated = outputs < len(weight)
        columns = min(WIDEST, triton.next_power_of_2(size))
        warps = 4 if columns <= 4096 else 8
        lines = max(1, VALUES * 32 * warps // columns // (2 if gated else 1))
        if update:
            # A program computes outputs of one part.
            lines = math.gcd(lines, *update[0].outputs)
        places, names = row_arguments(update)
        _one_row[(triton.cdiv(outputs, lines),)](
            given,
            weight,
            output,
            scale.weight if scale else given,
            given if added is None else added,
            *places,
            scale.epsilon if scale else 0.0,
            outputs,
            size,
            lines=lines,
            columns=columns,
            steps=triton.cdiv(size, columns),
            has_norm=scale is not None,
            adds=added is not None,
            gated=gated,
            **names,
            num_warps=warps,
            **self._options,
        )

    def _launch_few(
        self,
        given: Tensor,
        weight: Tensor,
        output: Tensor,
        added: Tensor | None,
    ) -> None:
        size, (rows, outputs) = given.shape[1], output.shape
        gated = outputs < len(weight)
        shared = shares(outputs // LINES, size)
        # What fits the shared memory, and was faster on an H200.
        deeper = rows <= MOST_ROWS // 2 and shared > 1 and size % (2 * DEPTH * shared) == 0
        depth = 2 * DEPTH if deeper and not gated else DEPTH
        _few_rows[(outputs // LINES, shared)](
            given,
            weight,
            output,
            given if added is None else added,
            self._partial,
            self._done,
            rows,
            outputs,
            size=size,
            padded_rows=max(16, triton.next_power_of_2(rows)),
            lines=LINES,
            depth=depth,
            shares=shared,
            adds=added is not None,
            gated=gated,
            num_warps=4,
            num_stages=3 if depth > DEPTH else 4,
            **self._options,
        )


def shared_memory(device: torch.device) -> float:
    """Bytes of a program."""
    if device.type != "cuda":
        return math.inf
    untyped: Any = torch.cuda.get_device_properties(device)
    return float(untyped.shared_memory_per_block_optin)


def shares(tiles: int, size: int) -> int:
    """Number of programs for the `size` inputs of each of `tiles`: enough to fill a GPU, if all have enough to do."""
    found = 1
    while (
        2 * found * tiles <= PROGRAMS
        and 2 * found <= MOST_SHARES
        and size // (2 * found) >= LEAST_SHARE
        and size % (2 * found * DEPTH) == 0
    ):
        found *= 2
    return found
