"""The updates of adapters, B A x, in two kernels: shrink multiplies by A, expand by B.

A program takes a tile: rows with the same slot, at most as many as a matrix instruction multiplies at once. Ranks
beyond that of the slot are left out. Each launch beside those of a layer costs more than 2 us, so products of few rows,
and wide ones, shrink as well, in programs of their own with some units each, otherwise shrink runs beside the product,
and expand computes the activation after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap

RANKS = 16
"""Ranks of a program, and a divisor of the ranks of a table."""
MOST_PARTS = 3
COLUMNS = 128
"""Outputs of a program."""
TILE_WORDS = 4
"""Words of a tile: the slot, -1 without an adapter; the place of the first row in the order; the rows; and padding."""
UNIT_WORDS = 2
"""Words of a unit: a slot with rows, and the first of RANKS ranks that it has in some layer. The words before hold the
number of units."""
FEW_ROWS = 16
"""Rows of a tile of a decode step."""
MANY_ROWS = 64
"""Rows of a tile of chunks."""
DEPTHS = {FEW_ROWS: 256, MANY_ROWS: 128}
"""Inputs multiplied at once, by the rows of a tile."""
SHARES = {FEW_ROWS: 8, MANY_ROWS: 2}
"""Most programs for the inputs of a tile."""
FLOAT_DEPTH = 64
WARPS = {FEW_ROWS: 2, MANY_ROWS: 4}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of a step by slot."""

    words: Tensor
    """[tiles, TILE_WORDS] int64"""
    order: Tensor
    """All rows, in the order of tiles, [rows] int64."""
    slots: Tensor
    """The slot of each row, -1 without an adapter, [rows] int64."""
    units: Tensor
    """[1 + units, UNIT_WORDS] int64"""
    rows: int
    """Most rows of a tile: FEW_ROWS or MANY_ROWS."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The updates of some outputs of a layer by slot."""

    a: Tensor
    """[slots, ranks, inputs]"""
    b: Tensor
    """[slots, ranks, outputs]"""
    ranks: Tensor
    """[slots] int32"""


@triton.jit
def of_part(part, first, second, third):
    """Selects the pointer of a part. The compiler still knows the alignment, unlike after a load."""
    return tl.where(part == 2, third, tl.where(part == 1, second, first))


@triton.jit
def _shrink(
    given,
    first_a,
    second_a,
    third_a,
    first_ranks,
    second_ranks,
    third_ranks,
    tiles,
    order,
    inner,
    rows,
    tile_count,
    size,
    most_rank,
    parts: tl.constexpr,
    tile_rows: tl.constexpr,
    depth: tl.constexpr,
    steps: tl.constexpr,
    ranks: tl.constexpr,
    tile_words: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (share of the inputs, part and ranks, tile). `inner` is [shares, parts, rows, most_rank]."""
    if overlaps:
        gdc_launch_dependents()
    index = tl.program_id(0)
    tile = index % tile_count
    index = index // tile_count
    runs = most_rank // ranks
    part = index % (parts * runs) // runs
    run = index % runs
    share = index // (parts * runs)
    slot = tl.load(tiles + tile * tile_words)
    first = tl.load(tiles + tile * tile_words + 1)
    count = tl.load(tiles + tile * tile_words + 2)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    rank = tl.load(of_part(part, first_ranks, second_ranks, third_ranks) + slot)
    used = there & (run * ranks < rank)
    r = run * ranks + tl.arange(0, ranks)
    k = share * steps * depth + tl.arange(0, depth)
    place = of_part(part, first_a, second_a, third_a)
    place += (slot * most_rank + r[None, :]) * size + k[:, None]
    w = tl.load(place, mask=used & (k < size)[:, None], other=0.0)
    at = tl.arange(0, tile_rows)
    in_tile = (at < count)[:, None]
    row = tl.load(order + first + at, mask=used & (at < count), other=0)
    if overlaps:
        gdc_wait()
    if used:
        source = given + row[:, None] * size + k[None, :]
        x = tl.load(source, mask=in_tile & (k < size)[None, :], other=0.0)
        y = tl.dot(x, w, input_precision="ieee")
        for step in range(1, steps):
            more = k + step * depth < size
            w = tl.load(place + step * depth, mask=more[:, None], other=0.0)
            x = tl.load(source + step * depth, mask=in_tile & more[None, :], other=0.0)
            y = tl.dot(x, w, y, input_precision="ieee")
        to = inner + ((share * parts + part) * rows + row)[:, None] * most_rank + r[None, :]
        tl.store(to, y, mask=in_tile)


@triton.jit
def _expanded(
    source,
    share_stride,
    in_tile,
    place,
    w,
    rank,
    in_outputs,
    outputs,
    shares: tl.constexpr,
    tile_rows: tl.constexpr,
    columns: tl.constexpr,
    ranks: tl.constexpr,
):
    """The product of the sum of the shares at `source` with B; `w` are the first ranks of B, at `place`."""
    y = tl.zeros((tile_rows, columns), tl.float32)
    for run in range(0, rank, ranks):
        m = tl.zeros((tile_rows, ranks), tl.float32)
        for share in tl.static_range(shares):
            m += tl.load(source + share * share_stride + run, mask=in_tile, other=0.0)
        y = tl.dot(m.to(w.dtype), w, y, input_precision="ieee")
        place += ranks * outputs
        w = tl.load(place, mask=(run + ranks < rank) & in_outputs, other=0.0)
    return y


@triton.jit
def _expand(
    inner,
    first_b,
    second_b,
    third_b,
    first_ranks,
    second_ranks,
    third_ranks,
    tiles,
    order,
    output,
    gated,
    rows,
    first_outputs,
    second_outputs,
    third_outputs,
    row_stride,
    most_rank,
    parts: tl.constexpr,
    shares: tl.constexpr,
    tile_rows: tl.constexpr,
    columns: tl.constexpr,
    gates: tl.constexpr,
    ranks: tl.constexpr,
    tile_words: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (tile, `columns` outputs of a part). With `gates`, the outputs of two parts, and the activation of all
    rows, with or without an adapter."""
    if overlaps:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    block = tl.program_id(1)
    part = 0
    outputs = first_outputs
    if not gates:
        second = tl.cdiv(first_outputs, columns)
        third = second + tl.cdiv(second_outputs, columns)
        part = (block >= second).to(tl.int32) + (block >= third).to(tl.int32)
        outputs = tl.where(
            part == 2, third_outputs, tl.where(part == 1, second_outputs, first_outputs)
        )
        block -= tl.where(part == 2, third, tl.where(part == 1, second, 0))
    n = block * columns + tl.arange(0, columns)
    in_outputs = (n < outputs)[None, :]
    slot = tl.load(tiles + tile * tile_words)
    first = tl.load(tiles + tile * tile_words + 1)
    count = tl.load(tiles + tile * tile_words + 2)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    rank = tl.load(of_part(part, first_ranks, second_ranks, third_ranks) + slot)
    rank = tl.where(there, rank, 0)
    changes = rank > 0
    r = tl.arange(0, ranks)
    at_b = (slot * most_rank + r[:, None]) * outputs + n[None, :]
    place = of_part(part, first_b, second_b, third_b) + at_b
    w = tl.load(place, mask=(rank > 0) & in_outputs, other=0.0)
    if gates:
        changes = count > 0
        other_rank = tl.where(there, tl.load(second_ranks + slot), 0)
        other_place = second_b + at_b
        other_w = tl.load(other_place, mask=(other_rank > 0) & in_outputs, other=0.0)
    at = tl.arange(0, tile_rows)
    row = tl.load(order + first + at, mask=changes & (at < count), other=rows)
    if overlaps:
        gdc_wait()
    if changes:
        changed = (row < rows)[:, None] & in_outputs
        begin = tl.where(part > 0, first_outputs, 0) + tl.where(part > 1, second_outputs, 0)
        to = output + row[:, None] * row_stride + begin + n[None, :]
        before = tl.load(to, mask=changed, other=0.0).to(tl.float32)
        in_tile = (row < rows)[:, None]
        share_stride = parts * rows * most_rank
        source = inner + (part * rows + row)[:, None] * most_rank + r[None, :]
        y = before + _expanded(
            source, share_stride, in_tile, place, w, rank, in_outputs, outputs, shares, tile_rows,
            columns, ranks,
        )  # fmt: skip
        if gates:
            z = tl.load(to + outputs, mask=changed, other=0.0).to(tl.float32)
            source += rows * most_rank
            z += _expanded(
                source, share_stride, in_tile, other_place, other_w, other_rank, in_outputs,
                outputs, shares, tile_rows, columns, ranks,
            )  # fmt: skip
            y = y / (1.0 + tl.exp(-y)) * z
            to = gated + row[:, None] * outputs + n[None, :]
        tl.store(to, y.to(output.dtype.element_ty), mask=changed)


@dataclass(frozen=True, slots=True)
class Updates:
    tiles: Tiles
    parts: Sequence[Factors]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Of MOST_PARTS parts."""
        return (*(each.b.shape[2] for each in self.parts), 0, 0)[:MOST_PARTS]

    @property
    def most_rank(self) -> int:
        return self.parts[0].a.shape[1]


@dataclass(frozen=True, slots=True)
class Inner:
    """A x for the rows of the tiles."""

    sums: Tensor
    shares: int
    aside: bool = False
    """Whether computed by another stream, so that `expand` begins after two kernels."""


def shrink(updates: Updates, given: Tensor, *, aside: bool = False) -> Inner:
    """A x of each part; `given` is [rows, inputs]. `aside` is for another stream than that of the step."""
    given = given.contiguous()
    tiles, parts, most_rank = updates.tiles, updates.parts, updates.most_rank
    size = given.shape[1]
    most = DEPTHS[tiles.rows] if given.dtype.itemsize == 2 else FLOAT_DEPTH
    depth = min(most, max(16, triton.next_power_of_2(size)))
    shares = min(SHARES[tiles.rows], triton.cdiv(size, depth))
    count = len(tiles.words)
    sums = torch.empty(shares * len(parts) * len(given) * most_rank, device=given.device)
    _shrink[(count * len(parts) * (most_rank // RANKS) * shares,)](
        given,
        *_three([each.a for each in parts]),
        *_three([each.ranks for each in parts]),
        tiles.words,
        tiles.order,
        sums,
        len(given),
        count,
        size,
        most_rank,
        parts=len(parts),
        tile_rows=tiles.rows,
        depth=depth,
        steps=triton.cdiv(size, depth * shares),
        ranks=RANKS,
        tile_words=TILE_WORDS,
        num_warps=WARPS[tiles.rows],
        **overlap(given.device, chained=not aside),
    )
    return Inner(sums, shares, aside)


def most_inner_bytes(rows: int, most_rank: int) -> int:
    """Memory of the result of `shrink`."""
    return 4 * rows * MOST_PARTS * max(SHARES.values()) * most_rank


def expand(updates: Updates, inner: Inner, output: Tensor) -> None:
    """Adds B of each part, multiplied with `inner`, to `output` [rows, outputs of all parts]."""
    blocks = sum(triton.cdiv(each, COLUMNS) for each in updates.outputs)
    _launch_expand(updates, inner, output, output, blocks)


def expand_gated(updates: Updates, inner: Inner, output: Tensor) -> Tensor:
    """silu(first half) * second half of the outputs of two parts after `expand`."""
    size = output.shape[1] // 2
    gated = output.new_empty(len(output), size)
    _launch_expand(updates, inner, output, gated, triton.cdiv(size, COLUMNS))
    return gated


def _launch_expand(
    updates: Updates, inner: Inner, output: Tensor, gated: Tensor, blocks: int
) -> None:
    tiles, parts = updates.tiles, updates.parts
    _expand[(len(tiles.words), blocks)](
        inner.sums,
        *_three([each.b for each in parts]),
        *_three([each.ranks for each in parts]),
        tiles.words,
        tiles.order,
        output,
        gated,
        len(output),
        *updates.outputs,
        output.stride(0),
        updates.most_rank,
        parts=len(parts),
        shares=inner.shares,
        tile_rows=tiles.rows,
        columns=COLUMNS,
        gates=gated is not output,
        ranks=RANKS,
        tile_words=TILE_WORDS,
        num_warps=WARPS[tiles.rows],
        **overlap(output.device, chained=not inner.aside),
    )


def shrink_arguments(updates: Updates | None, inner: Inner | None) -> Sequence[Any]:
    """The arguments of a product with updates in the first programs, if there are any; the last arguments are for
    several rows."""
    if updates is None or inner is None:
        return *(None,) * 8, 0, None
    tiles, parts = updates.tiles, updates.parts
    return (
        inner.sums,
        *_three([each.a for each in parts]),
        *_three([each.ranks for each in parts]),
        tiles.slots,
        updates.most_rank,
        tiles.units,
    )


def _three(given: Sequence[Any]) -> Sequence[Any]:
    """An entry for each of MOST_PARTS; the last part stands for missing parts."""
    return [*given, given[-1], given[-1]][:MOST_PARTS]
