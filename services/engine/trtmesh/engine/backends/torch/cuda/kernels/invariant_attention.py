"""Attention with results for a token that do not depend on the batch or on the chunks of a prompt, to the last bit.

Decoded tokens and tokens of prompts go through the same kernel, with rows for some tokens and the query heads of a key
head; a decoded token leaves most of them empty. Keys are taken in tiles, and tiles in runs, at positions that are the
same for every token. The results of runs are merged in order, by one program or by several, so cutting changes nothing.
Keys that a token does not see change nothing either: their weights are 0, and the factor is 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.attention import (
    NewTokens,
    RunWorkspace,
    arguments,
    constants,
    padded,
    scores_of,
    splits,
    with_new_token,
    with_sink,
    with_values,
)
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap
from trtmesh.engine.backends.torch.cuda.kernels.pages import Pages
from trtmesh.engine.backends.torch.cuda.kernels.prefill_attention import TILE
from trtmesh.engine.backends.torch.model.attention import Angles, Rule

ROWS = 64
"""Of a program: the least for matrix instructions of Hopper."""
RUN = 512
"""Keys of a run."""


@triton.jit
def _merged(m, total, sums, m2, total2, sums2):
    """Merges the results of two runs: highest score, sum of weights, weighted sum of values."""
    top = tl.maximum(m, m2)
    level = tl.where(top == float("-inf"), 0.0, top)
    one = tl.exp2(m - level)
    two = tl.exp2(m2 - level)
    return top, total * one + total2 * two, sums * one[:, None] + sums2 * two[:, None]


@triton.jit
def _attend(
    queries,
    kv,
    cos,
    sin,
    tiles,
    table,
    width,
    pool,
    output,
    partial,
    stats,
    done,
    sinks,
    layer_offset,
    block_stride,
    value_stride,
    head_stride,
    query_row,
    query_head,
    kv_row,
    kv_head,
    angle_row,
    scale,
    softcap,
    window,
    most_runs,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    keys: tl.constexpr,
    run: tl.constexpr,
    splits: tl.constexpr,
    decodes: tl.constexpr,
    turned: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    has_window: tl.constexpr,
    stages: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (tokens, KV head, number below `splits`). The splits share the runs. The tokens are a part of a tile of
    `tiles`, see `tiles_of`; with `decodes` a single one, at the position in `tiles`, which is stored as well."""
    if overlaps:
        gdc_launch_dependents()
    tokens: tl.constexpr = rows // padded_group
    log2_e: tl.constexpr = 1.4426950408889634
    kv_at = tl.program_id(1)
    share = tl.program_id(2)
    if decodes:
        token = tl.program_id(0).to(tl.int64)
        owner = token
        start = tl.load(tiles + token)
        length = 1
    else:
        # The last tiles of a sequence take longest, and should not begin last.
        backwards = tl.num_programs(0) - 1 - tl.program_id(0)
        parts: tl.constexpr = tile // tokens
        fields = tiles + (backwards // parts) * 4
        offset = (backwards % parts) * tokens
        owner = tl.load(fields)
        token = tl.load(fields + 1) + offset
        start = tl.load(fields + 2) + offset
        length = tl.minimum(tl.load(fields + 3) - offset, tokens)
    blocks = table + owner * tl.load(width)
    end = start + length
    first = 0
    if has_window:
        first = tl.maximum(start - window + 1, 0)
    first_run = first // run
    runs = (end - 1) // run + 1 - first_run
    if (share < runs) & (length > 0):
        r = tl.arange(0, rows)
        d = tl.arange(0, padded_dim)
        n = tl.arange(0, keys)
        i = r // padded_group
        g = r % padded_group
        in_dim = d < dim
        there = (i < length) & (g < group)
        whole = there[:, None] & in_dim[None, :]
        kind = pool.dtype.element_ty
        heads = kv_at * group + g
        own = start + i
        base = pool + layer_offset + kv_at * head_stride
        place_of_q = queries + (token + i[:, None]) * query_row + heads[:, None] * query_head
        if overlaps:
            gdc_wait()
        q = tl.load(place_of_q + d[None, :], mask=whole, other=0.0).to(kind)
        if decodes:
            place_of_key = kv + token * kv_row + kv_at * kv_head
            q, new_key, new_value = with_new_token(
                q, place_of_q, whole, place_of_key, kv_head, cos, sin, token, angle_row, d, in_dim,
                kv_heads, turned,
            )  # fmt: skip
            if share == 0:
                block = tl.load(blocks + start // block_tokens)
                # Rows without a sequence have the null block, always zero.
                if block != 0:
                    place = base + block * block_stride + (start % block_tokens) * dim + d
                    tl.store(place, new_key, mask=in_dim)
                    tl.store(place + value_stride, new_value, mask=in_dim)
        all_m = tl.full((rows,), float("-inf"), tl.float32)
        all_total = tl.zeros((rows,), tl.float32)
        all_sums = tl.zeros((rows, padded_dim), tl.float32)
        part = (token * kv_heads + kv_at) * most_runs
        for index in range(share, runs, splits):
            begin = (first_run + index) * run
            stop = tl.minimum(begin + run, end)
            m = tl.full((rows,), float("-inf"), tl.float32)
            total = tl.zeros((rows,), tl.float32)
            sums = tl.zeros((rows, padded_dim), tl.float32)
            if has_window:
                begin = tl.maximum(begin, first // keys * keys)
            else:
                # Keys seen by all tokens need no mask.
                seen = tl.minimum(stop, (start + 1 - decodes) // keys * keys)
                for at in tl.range(begin, seen, keys, num_stages=stages):
                    key = at + n
                    block = tl.load(blocks + key // block_tokens)
                    place = base + block * block_stride + (key % block_tokens) * dim
                    spots = place[:, None] + d[None, :]
                    k = tl.load(spots, mask=in_dim[None, :], other=0.0)
                    v = tl.load(spots + value_stride, mask=in_dim[None, :], other=0.0)
                    score = scores_of(q, k, scale, softcap, has_softcap)
                    score = score * log2_e
                    m, total, sums = with_values(m, total, sums, score, v, may_hide_all=False)
                begin = tl.maximum(begin, seen)
            for at in tl.range(begin, stop, keys, num_stages=stages):
                key = at + n
                stored = key < end - decodes
                if has_window:
                    # Blocks before the window may have been dropped.
                    stored = stored & (key > start - window)
                block = tl.load(blocks + key // block_tokens, mask=stored, other=0)
                place = base + block * block_stride + (key % block_tokens) * dim
                spots = place[:, None] + d[None, :]
                mask = stored[:, None] & in_dim[None, :]
                k = tl.load(spots, mask=mask, other=0.0)
                v = tl.load(spots + value_stride, mask=mask, other=0.0)
                if decodes:
                    is_new = (key == start)[:, None]
                    k = tl.where(is_new, new_key[None, :], k)
                    v = tl.where(is_new, new_value[None, :], v)
                score = scores_of(q, k, scale, softcap, has_softcap)
                visible = key[None, :] <= own[:, None]
                if has_window:
                    visible = visible & (key[None, :] > own[:, None] - window)
                score = tl.where(visible, score * log2_e, float("-inf"))
                # A token may see none of the keys before the window, nor keys of a later run.
                m, total, sums = with_values(m, total, sums, score, v, may_hide_all=True)
            if splits == 1 or runs == 1:
                all_m, all_total, all_sums = _merged(all_m, all_total, all_sums, m, total, sums)
            else:
                spot = (part + index) * group + g
                tl.store(
                    partial + spot[:, None] * padded_dim + d[None, :], sums, mask=there[:, None]
                )
                tl.store(stats + 2 * spot, m, mask=there)
                tl.store(stats + 2 * spot + 1, total, mask=there)
        last = runs > 0
        if splits > 1 and runs > 1:
            tl.debug_barrier()
            mine = tl.cdiv(runs - share, splits).to(tl.int32)
            last = tl.atomic_add(done + token * kv_heads + kv_at, mine) + mine == runs
            if last:
                tl.store(done + token * kv_heads + kv_at, 0)
                for index in range(runs):
                    spot = (part + index) * group + g
                    # Not from the first-level cache, perhaps older than the other programs' results.
                    m = tl.load(stats + 2 * spot, mask=there, other=0.0, cache_modifier=".cg")
                    total = tl.load(
                        stats + 2 * spot + 1, mask=there, other=1.0, cache_modifier=".cg"
                    )
                    sums = tl.load(
                        partial + spot[:, None] * padded_dim + d[None, :],
                        mask=there[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    all_m, all_total, all_sums = _merged(all_m, all_total, all_sums, m, total, sums)
        if last:
            if has_sinks:
                sink = tl.load(sinks + heads, mask=g < group, other=0.0)
                all_total, all_sums = with_sink(all_m, all_total, all_sums, sink)
            # Empty rows see nothing.
            all_total = tl.where(all_total > 0, all_total, 1.0)
            tl.store(
                output
                + ((token + i[:, None]) * kv_heads * group + heads[:, None]) * dim
                + d[None, :],
                (all_sums / all_total[:, None]).to(output.dtype.element_ty),
                mask=whole,
            )


def attend_chunks(
    queries: Tensor,
    tiles: Tensor,
    table: Tensor,
    width: Tensor,
    pages: Pages,
    layer: int,
    rule: Rule,
) -> Tensor:
    """Attends `tiles` [tiles, 4] of `queries` [tokens, heads, dim], whose keys and values are stored in blocks of
    `table`, rows of `width` [1] blocks; returns the shape of `queries`, without meaning for tokens of no tile."""
    return _launch(queries, queries, tiles, table, width, pages, layer, rule)


def attend_tokens(
    queries: Tensor,
    kv: Tensor,
    new: NewTokens,
    pages: Pages,
    layer: int,
    rule: Rule,
    workspace: RunWorkspace,
) -> Tensor:
    """`queries` [rows, heads, dim] and `kv` [rows, 2 * kv_heads, dim] are of the new tokens, which are stored; returns
    the shape of `queries`."""
    return _launch(
        queries, kv, new.positions, new.table, new.width, pages, layer, rule, workspace, new.angles
    )


def _launch(
    queries: Tensor,
    kv: Tensor,
    places: Tensor,
    table: Tensor,
    width: Tensor,
    pages: Pages,
    layer: int,
    rule: Rule,
    workspace: RunWorkspace | None = None,
    angles: Angles | None = None,
) -> Tensor:
    """Decodes where there is a workspace."""
    padded_group = triton.next_power_of_2(queries.shape[1] // pages.kv_heads)
    rows = max(ROWS, padded_group)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    cut = splits(len(places), pages.kv_heads) if workspace else 1
    parts = 1 if workspace else TILE * padded_group // rows
    row_bytes = padded(pages.dim) * pages.pool.dtype.itemsize
    wide = row_bytes > 256
    _attend[(len(places) * parts, pages.kv_heads, cut)](
        *arguments(
            queries, kv, places, table, width, pages, layer, rule, output, workspace, angles
        ),
        workspace.most_runs if workspace else 1,
        **constants(queries, pages, rule),
        padded_group=padded_group,
        rows=rows,
        tile=TILE,
        keys=32 if wide else 64,
        run=RUN,
        splits=cut,
        decodes=int(workspace is not None),
        turned=angles[0].shape[1] if angles else 0,
        has_window=rule.window is not None,
        stages=1 if wide else 2 if row_bytes <= 128 else 3,
        num_warps=8 if row_bytes > 128 else 4,
        # Compiled forms differ in the products fused with a sum and rounded once.
        enable_fp_fusion=False,
        **overlap(queries.device),
    )
    return output
