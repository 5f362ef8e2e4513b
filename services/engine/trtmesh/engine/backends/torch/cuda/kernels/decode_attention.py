"""Attention of one new token per sequence over the paged cache, with the rotation and the store of the new key and
value.

A sequence's keys are cut into at most MOST_SPLITS runs, by the length of the sequence alone, and the results of the
runs are merged in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.attention import (
    LEAST_SIZE,
    NewTokens,
    RunWorkspace,
    arguments,
    capped,
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
from trtmesh.engine.backends.torch.model.attention import Rule

LEAST_RUN = 256
"""Keys of a run, where a sequence has fewer than MOST_SPLITS times as many."""
FEW_PROGRAMS = 64
"""Up to this many pairs of row and KV head, each pair gets a whole multiprocessor."""


@triton.jit
def _merged(m, total, sums, m2, total2, sums2):
    """Merges the results of two parts of the keys: highest score, sum of weights, weighted sum of values."""
    top = tl.maximum(m, m2)
    one = tl.exp2(m - top)
    two = tl.exp2(m2 - top)
    return top, total * one + total2 * two, sums * one[:, None] + sums2 * two[:, None]


@triton.jit
def _decode(
    queries,
    kv,
    cos,
    sin,
    positions,
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
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    keys: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    splits: tl.constexpr,
    most_splits: tl.constexpr,
    least_run: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    writes: tl.constexpr,
    turned: tl.constexpr,
    stages: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (row, KV head, number below `splits`). The splits share the runs."""
    if overlaps:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    share = tl.program_id(2)
    log2_e: tl.constexpr = 1.4426950408889634
    position = tl.load(positions + row)
    blocks = table + row * tl.load(width)
    first = tl.maximum(position - window + 1, 0)
    seen = position - first
    run = tl.maximum(tl.cdiv(tl.cdiv(seen, most_splits), keys) * keys, least_run)
    runs = tl.maximum(tl.cdiv(seen, run), 1)
    if share < runs:
        d = tl.arange(0, padded_dim)
        g = tl.arange(0, padded_group)
        n = tl.arange(0, keys)
        in_dim = d < dim
        whole = (g < group)[:, None] & in_dim[None, :]
        kind = pool.dtype.element_ty
        heads = head * group + g
        place_of_q = queries + row * query_row + heads[:, None] * query_head
        own = kv + row * kv_row + head * kv_head
        base = pool + layer_offset + head * head_stride
        if overlaps:
            gdc_wait()
        q = tl.load(place_of_q + d[None, :], mask=whole, other=0.0).to(kind)
        q, new_key, new_value = with_new_token(
            q, place_of_q, whole, own, kv_head, cos, sin, row, angle_row, d, in_dim, kv_heads, turned
        )  # fmt: skip
        if writes and share == 0:
            block = tl.load(blocks + position // block_tokens)
            # Rows without a sequence have the null block, always zero.
            if block != 0:
                place = base + block * block_stride + (position % block_tokens) * dim + d
                tl.store(place, new_key, mask=in_dim)
                tl.store(place + value_stride, new_value, mask=in_dim)
        own_score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        if has_softcap:
            own_score = capped(own_score, softcap)
        own_score = own_score * log2_e
        all_m = tl.full((padded_group,), float("-inf"), tl.float32)
        all_total = tl.zeros((padded_group,), tl.float32)
        all_sums = tl.zeros((padded_group, padded_dim), tl.float32)
        part = (row * kv_heads + head) * most_splits
        for index in range(share, runs, splits):
            begin = first + index * run
            end = tl.minimum(begin + run, position)
            # The new token belongs to the first run.
            is_first = index == 0
            m = tl.where(is_first, own_score, float("-inf"))
            total = tl.zeros((padded_group,), tl.float32) + tl.where(is_first, 1.0, 0.0)
            sums = tl.zeros((padded_group, padded_dim), tl.float32)
            sums += tl.where(is_first, new_value.to(tl.float32), 0.0)[None, :]
            for at in tl.range(begin, end, keys, num_stages=stages):
                key = at + n
                there = key < end
                block = tl.load(blocks + key // block_tokens, mask=there, other=0)
                place = base + block * block_stride + (key % block_tokens) * dim
                spots = place[:, None] + d[None, :]
                mask = there[:, None] & in_dim[None, :]
                k = tl.load(spots, mask=mask, other=0.0)
                v = tl.load(spots + value_stride, mask=mask, other=0.0)
                score = scores_of(q, k, scale, softcap, has_softcap)
                score = tl.where(there[None, :], score * log2_e, float("-inf"))
                m, total, sums = with_values(m, total, sums, score, v, may_hide_all=False)
            if runs == 1 or (splits == 1 and is_first):
                all_m, all_total, all_sums = m, total, sums
            elif splits == 1:
                all_m, all_total, all_sums = _merged(all_m, all_total, all_sums, m, total, sums)
            else:
                spot = (part + index) * group + g
                tl.store(
                    partial + spot[:, None] * padded_dim + d[None, :],
                    sums,
                    mask=(g < group)[:, None],
                )
                tl.store(stats + 2 * spot, m, mask=g < group)
                tl.store(stats + 2 * spot + 1, total, mask=g < group)
        last = runs > 0
        if splits > 1 and runs > 1:
            tl.debug_barrier()
            mine = tl.cdiv(runs - share, splits).to(tl.int32)
            last = tl.atomic_add(done + row * kv_heads + head, mine) + mine == runs
            if last:
                tl.store(done + row * kv_heads + head, 0)
                for index in range(runs):
                    spot = (part + index) * group + g
                    # Not from the first-level cache, perhaps older than the other programs' results.
                    m = tl.load(stats + 2 * spot, mask=g < group, other=0.0, cache_modifier=".cg")
                    total = tl.load(
                        stats + 2 * spot + 1, mask=g < group, other=1.0, cache_modifier=".cg"
                    )
                    sums = tl.load(
                        partial + spot[:, None] * padded_dim + d[None, :],
                        mask=(g < group)[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    if index == 0:
                        all_m, all_total, all_sums = m, total, sums
                    else:
                        all_m, all_total, all_sums = _merged(
                            all_m, all_total, all_sums, m, total, sums
                        )
        if last:
            if has_sinks:
                sink = tl.load(sinks + heads, mask=g < group, other=0.0)
                all_total, all_sums = with_sink(all_m, all_total, all_sums, sink)
            tl.store(
                output + (row * kv_heads * group + heads[:, None]) * dim + d[None, :],
                (all_sums / all_total[:, None]).to(output.dtype.element_ty),
                mask=whole,
            )


def decode_attention(
    queries: Tensor,
    kv: Tensor,
    new: NewTokens,
    pages: Pages,
    layer: int,
    rule: Rule,
    workspace: RunWorkspace,
) -> Tensor:
    """`queries` [rows, heads, dim] and `kv` [rows, 2 * kv_heads, dim] are of the new tokens; returns the shape of
    `queries`."""
    rows, heads, _ = queries.shape
    keys, stages, warps = _shape(pages, rows * pages.kv_heads)
    cut = splits(rows, pages.kv_heads)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    _decode[(rows, pages.kv_heads, cut)](
        *arguments(
            queries, kv, new.positions, new.table, new.width, pages, layer, rule, output, workspace,
            new.angles,
        ),
        **constants(queries, pages, rule),
        keys=keys,
        padded_group=max(LEAST_SIZE, triton.next_power_of_2(heads // pages.kv_heads)),
        splits=cut,
        most_splits=workspace.most_runs,
        least_run=LEAST_RUN,
        writes=new.writes,
        turned=new.angles[0].shape[1] if new.angles else 0,
        stages=stages,
        num_warps=warps,
        **overlap(queries.device),
    )  # fmt: skip
    return output


def _shape(pages: Pages, pairs: int) -> tuple[int, int, int]:
    """Keys at once, stages of loads, and warps: the fastest values on an H200, for this number of pairs of row and KV
    head, within a multiprocessor's shared memory."""
    size = pages.pool.dtype.itemsize
    row_bytes = padded(pages.dim) * size
    if row_bytes > 256:
        return (32, 2, 4) if row_bytes <= 1024 else (16, 1, 4)
    if size > 2:
        return 64, 3, 4
    if pairs > FEW_PROGRAMS:
        return 32, 3, 1
    return (128, 2, 4) if row_bytes <= 128 else (64, 3, 4)
