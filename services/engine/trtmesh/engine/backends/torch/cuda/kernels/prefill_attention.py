"""Attention of chunks of prompts over the paged cache, with the keys and values of the chunks already stored."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.attention import (
    NO_WINDOW,
    constants,
    padded,
    scores_of,
    with_sink,
    with_values,
)
from trtmesh.engine.backends.torch.cuda.kernels.pages import Pages
from trtmesh.engine.backends.torch.model.attention import Rule

TILE = 64
"""Most tokens of a chunk for one program."""


@triton.jit
def _prefill(
    queries,
    table,
    tiles,
    pool,
    output,
    sinks,
    width,
    layer_offset,
    block_stride,
    value_stride,
    head_stride,
    query_row,
    query_head,
    scale,
    softcap,
    window,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    tile: tl.constexpr,
    keys: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    has_window: tl.constexpr,
    stages: tl.constexpr,
):
    """Program: (head, tile). `tiles` [tiles, 4]: row of the table, first token, position of this token, number of
    tokens."""
    head = tl.program_id(0)
    # The last tiles of a sequence take longest, and should not begin last.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    row = tl.load(tiles + index * 4)
    token = tl.load(tiles + index * 4 + 1)
    start = tl.load(tiles + index * 4 + 2)
    length = tl.load(tiles + index * 4 + 3)
    log2_e: tl.constexpr = 1.4426950408889634
    i = tl.arange(0, tile)
    d = tl.arange(0, padded_dim)
    n = tl.arange(0, keys)
    in_dim = d < dim
    whole = (i < length)[:, None] & in_dim[None, :]
    kind = pool.dtype.element_ty
    q = tl.load(
        queries + (token + i[:, None]) * query_row + head * query_head + d[None, :],
        mask=whole,
        other=0.0,
    ).to(kind)
    blocks = table + row * width
    base = pool + layer_offset + (head // group) * head_stride
    m = tl.full((tile,), float("-inf"), tl.float32)
    total = tl.zeros((tile,), tl.float32)
    sums = tl.zeros((tile, padded_dim), tl.float32)
    end = start + length
    # Keys seen by all tokens of the tile need no mask.
    if has_window:
        seen = tl.maximum(start - window + 1, 0) // keys * keys
    else:
        seen = (start + 1) // keys * keys
        for at in tl.range(0, seen, keys, num_stages=stages):
            key = at + n
            block = tl.load(blocks + key // block_tokens)
            place = base + block * block_stride + (key % block_tokens) * dim
            spots = place[:, None] + d[None, :]
            k = tl.load(spots, mask=in_dim[None, :], other=0.0)
            v = tl.load(spots + value_stride, mask=in_dim[None, :], other=0.0)
            score = scores_of(q, k, scale, softcap, has_softcap)
            m, total, sums = with_values(m, total, sums, score * log2_e, v, may_hide_all=False)
    for at in tl.range(seen, end, keys, num_stages=stages):
        key = at + n
        there = key < end
        if has_window:
            # Blocks before the window may have been dropped.
            there = there & (key > start - window)
        block = tl.load(blocks + key // block_tokens, mask=there, other=0)
        place = base + block * block_stride + (key % block_tokens) * dim
        spots = place[:, None] + d[None, :]
        mask = there[:, None] & in_dim[None, :]
        k = tl.load(spots, mask=mask, other=0.0)
        v = tl.load(spots + value_stride, mask=mask, other=0.0)
        score = scores_of(q, k, scale, softcap, has_softcap)
        own = start + i[:, None]
        visible = key[None, :] <= own
        if has_window:
            visible = visible & (key[None, :] > own - window)
        score = tl.where(visible, score * log2_e, float("-inf"))
        # A token may see none of the keys before the window.
        m, total, sums = with_values(m, total, sums, score, v, may_hide_all=True)
    if has_sinks:
        total, sums = with_sink(m, total, sums, tl.load(sinks + head))
    # A row beyond the chunk sees nothing, and is not stored.
    total = tl.where(total > 0, total, 1.0)
    tl.store(
        output + ((token + i[:, None]) * (kv_heads * group) + head) * dim + d[None, :],
        (sums / total[:, None]).to(output.dtype.element_ty),
        mask=whole,
    )


def tiles_of(starts: list[int], counts: list[int], first_row: int, first: int) -> list[list[int]]:
    """The tiles of consecutive chunks, from token `first` and the table's row `first_row` on, with `counts` tokens from
    the positions `starts` on."""
    tiles = []
    for place, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for offset in range(0, count, TILE):
            length = min(TILE, count - offset)
            tiles.append([first_row + place, first + offset, start + offset, length])
        first += count
    # Programs of later tiles begin earlier.
    return sorted(tiles, key=lambda tile: tile[2])


def prefill_attention(
    queries: Tensor,
    tiles: Tensor,
    table: Tensor,
    pages: Pages,
    layer: int,
    rule: Rule,
    output: Tensor,
) -> None:
    """Attends `tiles` [tiles, 4] of `queries` [tokens, heads, dim]; `table` is [rows, width]. Writes the rows of the
    contiguous `output` [tokens, heads, dim]."""
    row_bytes = padded(pages.dim) * pages.pool.dtype.itemsize
    wide = row_bytes > 256
    _prefill[(queries.shape[1], len(tiles))](
        queries,
        table,
        tiles,
        pages.pool,
        output,
        queries if rule.sinks is None else rule.sinks,
        table.shape[1],
        *pages.strides(layer),
        *queries.stride()[:2],
        rule.scale,
        rule.softcap or 1.0,
        rule.window or NO_WINDOW,
        **constants(queries, pages, rule),
        tile=TILE,
        keys=32 if wide else 64,
        has_window=rule.window is not None,
        # Measured: for rows this short, a third stage costs more than the hidden time.
        stages=1 if wide else 2 if row_bytes <= 128 else 3,
        num_warps=4,
    )
