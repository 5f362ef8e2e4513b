"""Mixtures of experts: each token goes through a few of many gated MLPs.

A pair is a token with one expert. Pairs of an expert form tiles, listed on the device, so a graph serves any choice of
experts. A pair's result depends neither on the other pairs nor on the tiles, and a token's pairs are added up in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap
from trtmesh.engine.backends.torch.cuda.kernels.products import SHARED_MEMORY, shared_memory

TILE_WORDS = 4
"""Words of a tile: the expert, the place of the first pair in the order, the number of pairs, and padding."""
FEW_PAIRS, MANY_PAIRS = 16, 64
"""Most pairs of a tile."""
PAIRS_OF_FEW = 16
"""Most pairs of an expert on average with tiles of FEW_PAIRS."""
LISTED = 1024
"""Pairs read at once by a program to list pairs."""
LINES = 64
"""Outputs computed by a program."""
COLUMNS = 1024
"""Columns added up by a program."""


@triton.jit
def _list(
    ids,
    order,
    tiles,
    pairs,
    most_tiles,
    experts: tl.constexpr,
    bins: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_words: tl.constexpr,
    listed: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: an expert. Lists the pairs and tiles of the expert. The last program lists tiles without pairs."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.program_id(0)
    i = tl.arange(0, listed)
    counts = tl.zeros((bins,), tl.int32)
    for first in range(0, pairs, listed):
        found = tl.load(ids + first + i, mask=first + i < pairs, other=experts).to(tl.int32)
        counts += tl.histogram(found, bins)
    expert = tl.arange(0, bins)
    wanted = (counts + tile_pairs - 1) // tile_pairs
    place = tl.sum(tl.where(expert < own, counts, 0), 0)
    tile = tl.sum(tl.where(expert < own, wanted, 0), 0)
    count = tl.sum(tl.where(expert == own, counts, 0), 0)
    if own == experts:
        for at in range(tile, most_tiles):
            tl.store(tiles + at * tile_words + 2, 0)
    else:
        for at in range(0, count, tile_pairs):
            fields = tiles + (tile + at // tile_pairs) * tile_words
            tl.store(fields, own)
            tl.store(fields + 1, place + at)
            tl.store(fields + 2, tl.minimum(count - at, tile_pairs))
        for first in range(0, pairs, listed):
            found = tl.load(ids + first + i, mask=first + i < pairs, other=experts).to(tl.int32)
            is_own = (found == own).to(tl.int32)
            tl.store(order + place + tl.cumsum(is_own, 0) - 1, first + i, mask=found == own)
            place += tl.sum(is_own, 0)


@triton.jit
def _multiply(
    given,
    weights,
    factors,
    output,
    tiles,
    order,
    outputs,
    chosen,
    size: tl.constexpr,
    tile_pairs: tl.constexpr,
    lines: tl.constexpr,
    depth: tl.constexpr,
    is_whole: tl.constexpr,
    gated: tl.constexpr,
    tile_words: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (`lines` outputs, tile). With `gated`, silu(first half) * second half for rows of tokens with `chosen`
    pairs each; otherwise rows of pairs, times their factors."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    fields = tiles + tl.program_id(1) * tile_words
    count = tl.load(fields + 2)
    if count > 0:
        expert = tl.load(fields).to(tl.int64)
        at = tl.arange(0, tile_pairs)
        pair = tl.load(order + tl.load(fields + 1) + at, mask=at < count, other=0)
        row = pair // chosen if gated else pair
        in_tile = (at < count)[None, :]
        line = tl.program_id(0) * lines + tl.arange(0, lines)
        in_lines = (line < outputs)[:, None]
        k = tl.arange(0, depth)
        second = outputs.to(tl.int64) * size
        place = weights + expert * (second * 2 if gated else second)
        place += line[:, None].to(tl.int64) * size + k[None, :]
        source = given + row[None, :].to(tl.int64) * size + k[:, None]
        y = tl.zeros((lines, tile_pairs), tl.float32)
        z = tl.zeros((lines, tile_pairs), tl.float32)
        for step in range(0, size, depth):
            in_first, in_second = in_lines, in_tile
            if not is_whole:
                there = step + k < size
                in_first, in_second = in_lines & there[None, :], in_tile & there[:, None]
            a = tl.load(place + step, mask=in_first, other=0.0)
            x = tl.load(source + step, mask=in_second, other=0.0)
            y = tl.dot(a, x, y, input_precision="ieee")
            if gated:
                b = tl.load(place + second + step, mask=in_first, other=0.0)
                z = tl.dot(b, x, z, input_precision="ieee")
        if gated:
            y = y / (1.0 + tl.exp(-y)) * z
        else:
            y *= tl.load(factors + pair, mask=at < count, other=0.0).to(tl.float32)[None, :]
        spot = pair[None, :].to(tl.int64) * outputs + line[:, None]
        tl.store(output + spot, y.to(output.dtype.element_ty), mask=in_tile & in_lines)


@triton.jit
def _add(of_pairs, output, chosen, size, columns: tl.constexpr, overlaps: tl.constexpr):
    """Program: (token, `columns` outputs)."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * columns + tl.arange(0, columns)
    y = tl.zeros((columns,), tl.float32)
    for pair in range(chosen):
        y += tl.load(of_pairs + (token * chosen + pair) * size + at, mask=at < size, other=0.0)
    tl.store(output + token * size + at, y.to(output.dtype.element_ty), mask=at < size)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The pairs of a step by expert."""

    tiles: Tensor
    """[tiles, TILE_WORDS] int32"""
    order: Tensor
    """[pairs] int32"""
    size: int
    """Most pairs of a tile."""


def experts(given: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """The sum over the chosen experts of factor * down(silu(gate(row)) * up(row)), for rows `given` [tokens, size].

    `gate_up` is [experts, 2 * inner, size], `down` [experts, size, inner], `ids` and `factors` [tokens, chosen].
    """
    given, ids, factors = given.contiguous(), ids.contiguous(), factors.contiguous()
    tokens, chosen = ids.shape
    size, inner = given.shape[1], down.shape[2]
    output = torch.empty_like(given)
    if not tokens:
        return output
    pairs = _pairs(ids, len(down))
    gated = given.new_empty(tokens * chosen, inner)
    _launch(given, gate_up, factors, gated, pairs, chosen, gated=True)
    of_pairs = torch.empty(tokens * chosen, size, device=given.device)
    _launch(gated, down, factors, of_pairs, pairs, chosen, gated=False)
    columns = min(COLUMNS, triton.next_power_of_2(size))
    _add[(tokens, triton.cdiv(size, columns))](
        of_pairs, output, chosen, size, columns=columns, **overlap(given.device)
    )
    return output


def _pairs(ids: Tensor, count: int) -> _Pairs:
    pairs = ids.numel()
    size = FEW_PAIRS if pairs <= PAIRS_OF_FEW * count else MANY_PAIRS
    most = min(pairs, pairs // size + count)
    tiles = torch.empty(most, TILE_WORDS, dtype=torch.int32, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    _list[(count + 1,)](
        ids,
        order,
        tiles,
        pairs,
        most,
        experts=count,
        bins=triton.next_power_of_2(count + 1),
        tile_pairs=size,
        tile_words=TILE_WORDS,
        listed=LISTED,
        **overlap(ids.device),
    )
    return _Pairs(tiles, order, size)


def _launch(
    given: Tensor,
    weights: Tensor,
    factors: Tensor,
    output: Tensor,
    pairs: _Pairs,
    chosen: int,
    *,
    gated: bool,
) -> None:
    size, outputs = given.shape[1], output.shape[1]
    has_room = shared_memory(given.device) >= SHARED_MEMORY
    depth = 32 if weights.dtype.itemsize > 2 else 128 if has_room else 64
    _multiply[(triton.cdiv(outputs, LINES), len(pairs.tiles))](
        given,
        weights,
        factors,
        output,
        pairs.tiles,
        pairs.order,
        outputs,
        chosen,
        size=size,
        tile_pairs=pairs.size,
        lines=LINES,
        depth=depth,
        is_whole=size % depth == 0 and outputs % LINES == 0,
        gated=gated,
        tile_words=TILE_WORDS,
        num_warps=4,
        num_stages=3 if gated else 4,
        **overlap(given.device),
    )
