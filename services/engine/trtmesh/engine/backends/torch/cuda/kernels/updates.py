"""The updates of adapters, B A x, in two kernels: shrink multiplies by A, expand by B.

A program takes a tile: rows with the same slot, at most as many as a matrix instruction multiplies at once. Rows
without an adapter belong to no tile, and ranks beyond that of the slot are left out.
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
"""Slot, or -1; first of its rows in the order; rows; nothing."""
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
    """Rows, those of a tile side by side, [rows] int64."""
    rows: int
    """Of a tile at most: FEW_ROWS or MANY_ROWS."""


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
def _of_part(part, first, second, third):
    found = first
    if part == 1:
        found = second
    if part == 2:
        found = third
    return found


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
    size,
    most_rank,
    tile_rows: tl.constexpr,
    depth: tl.constexpr,
    steps: tl.constexpr,
    ranks: tl.constexpr,
    tile_words: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (tile, part and ranks, share of the inputs). `inner` is [tiles, parts, shares, tile_rows, most_rank]."""
    if overlaps:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    runs = most_rank // ranks
    part = tl.program_id(1) // runs
    run = tl.program_id(1) % runs
    share = tl.program_id(2)
    slot = tl.load(tiles + tile * tile_words)
    first = tl.load(tiles + tile * tile_words + 1)
    count = tl.load(tiles + tile * tile_words + 2)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    rank = tl.load(_of_part(part, first_ranks, second_ranks, third_ranks) + slot)
    used = there & (run * ranks < rank)
    r = run * ranks + tl.arange(0, ranks)
    k = share * steps * depth + tl.arange(0, depth)
    place = _of_part(part, first_a, second_a, third_a)
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
        parts = tl.num_programs(1) // runs
        block = (tile * parts + part) * tl.num_programs(2) + share
        to = inner + block.to(tl.int64) * tile_rows * most_rank
        tl.store(to + at[:, None] * most_rank + r[None, :], y)


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
    first_outputs,
    second_outputs,
    third_outputs,
    row_stride,
    most_rank,
    parts: tl.constexpr,
    shares: tl.constexpr,
    tile_rows: tl.constexpr,
    columns: tl.constexpr,
    ranks: tl.constexpr,
    tile_words: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (tile, `columns` outputs of a part)."""
    if overlaps:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    block = tl.program_id(1)
    second = tl.cdiv(first_outputs, columns)
    third = second + tl.cdiv(second_outputs, columns)
    part = (block >= second).to(tl.int32) + (block >= third).to(tl.int32)
    outputs = tl.where(part == 2, third_outputs, tl.where(part == 1, second_outputs, first_outputs))
    block -= tl.where(part == 2, third, tl.where(part == 1, second, 0))
    n = block * columns + tl.arange(0, columns)
    slot = tl.load(tiles + tile * tile_words)
    first = tl.load(tiles + tile * tile_words + 1)
    count = tl.load(tiles + tile * tile_words + 2)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    rank = tl.load(_of_part(part, first_ranks, second_ranks, third_ranks) + slot)
    rank = tl.where(there, rank, 0)
    r = tl.arange(0, ranks)
    place = _of_part(part, first_b, second_b, third_b)
    place += (slot * most_rank + r[:, None]) * outputs + n[None, :]
    w = tl.load(place, mask=(rank > 0) & (n < outputs)[None, :], other=0.0)
    at = tl.arange(0, tile_rows)
    row = tl.load(order + first + at, mask=(rank > 0) & (at < count), other=0)
    if overlaps:
        gdc_wait()
    if rank > 0:
        begin = tl.where(part > 0, first_outputs, 0) + tl.where(part > 1, second_outputs, 0)
        to = output + row[:, None] * row_stride + begin + n[None, :]
        changed = (at < count)[:, None] & (n < outputs)[None, :]
        before = tl.load(to, mask=changed, other=0.0)
        source = inner + (tile * parts + part).to(tl.int64) * shares * tile_rows * most_rank
        source += at[:, None] * most_rank + r[None, :]
        y = tl.zeros((tile_rows, columns), tl.float32)
        for run in range(0, rank, ranks):
            m = tl.zeros((tile_rows, ranks), tl.float32)
            for share in tl.static_range(shares):
                m += tl.load(source + share * tile_rows * most_rank + run)
            y = tl.dot(m.to(w.dtype), w, y, input_precision="ieee")
            more = run + ranks < rank
            place += ranks * outputs
            w = tl.load(place, mask=more & (n < outputs)[None, :], other=0.0)
        tl.store(to, (before.to(tl.float32) + y).to(output.dtype.element_ty), mask=changed)


@dataclass(frozen=True, slots=True)
class Updates:
    """The updates of a layer in a step."""

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


def shrink(updates: Updates, given: Tensor) -> Inner:
    """A x of each part; `given` is [rows, inputs]."""
    given = given.contiguous()
    tiles, parts, most_rank = updates.tiles, updates.parts, updates.most_rank
    size = given.shape[1]
    most = DEPTHS[tiles.rows] if given.dtype.itemsize == 2 else FLOAT_DEPTH
    depth = min(most, max(16, triton.next_power_of_2(size)))
    shares = min(SHARES[tiles.rows], triton.cdiv(size, depth))
    count = len(tiles.words)
    sums = torch.empty(count * len(parts) * shares * tiles.rows * most_rank, device=given.device)
    _shrink[(count, len(parts) * (most_rank // RANKS), shares)](
        given,
        *_three([each.a for each in parts]),
        *_three([each.ranks for each in parts]),
        tiles.words,
        tiles.order,
        sums,
        size,
        most_rank,
        tile_rows=tiles.rows,
        depth=depth,
        steps=triton.cdiv(size, depth * shares),
        ranks=RANKS,
        tile_words=TILE_WORDS,
        num_warps=WARPS[tiles.rows],
        **overlap(given.device),
    )
    return Inner(sums, shares)


def most_inner_bytes(tiles: int, tile_rows: int, most_rank: int) -> int:
    """Memory of the result of `shrink`."""
    return 4 * tiles * MOST_PARTS * SHARES[tile_rows] * tile_rows * most_rank


def expand(updates: Updates, inner: Inner, output: Tensor) -> None:
    """Adds B of each part, multiplied with `inner`, to `output` [rows, outputs of all parts]."""
    tiles, parts = updates.tiles, updates.parts
    blocks = sum(triton.cdiv(each, COLUMNS) for each in updates.outputs)
    _expand[(len(tiles.words), blocks)](
        inner.sums,
        *_three([each.b for each in parts]),
        *_three([each.ranks for each in parts]),
        tiles.words,
        tiles.order,
        output,
        *updates.outputs,
        output.stride(0),
        updates.most_rank,
        parts=len(parts),
        shares=inner.shares,
        tile_rows=tiles.rows,
        columns=COLUMNS,
        ranks=RANKS,
        tile_words=TILE_WORDS,
        num_warps=WARPS[tiles.rows],
        **overlap(output.device),
    )


def _three(given: Sequence[Any]) -> Sequence[Any]:
    """One for each of MOST_PARTS; the last stands for parts that are not there."""
    return [*given, given[-1], given[-1]][:MOST_PARTS]


def updates_reference(
    slots: Sequence[int], parts: Sequence[Factors], given: Tensor, output: Tensor
) -> Tensor:
    """`output` with the update of each row's slot, -1 for none."""
    wide = output.double()
    for row, slot in enumerate(slots):
        first = 0
        for part in parts:
            after = first + part.b.shape[2]
            if slot >= 0:
                rank = int(part.ranks[slot])
                inner = part.a[slot, :rank].double() @ given[row].double()
                wide[row, first:after] += inner @ part.b[slot, :rank].double()
            first = after
    return wide
