"""What the kernels of attention share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.kernels.pages import Pages
from trtmesh.engine.backends.torch.model.attention import Angles, Rule

MOST_SPLITS = 16
"""Most programs for the runs of a sequence."""
PROGRAMS = 4096
"""Programs of a launch with cut sequences: many times the programs to fill a large GPU. So a long sequence among short
sequences is cut as finely as alone."""
MOST_CUT_PAIRS = 512
"""Pairs of row and KV head of such a launch. More fill a GPU, and programs without work would take time."""
LEAST_SIZE = 16
"""Least size of a matrix product's operand."""
NO_WINDOW = 2**31 - 1

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _turned(x, swapped, cos, sin, sign):
    """x * cos + rotate_half(x) * sin"""
    return (x.to(tl.float32) * cos + swapped.to(tl.float32) * (sin * sign)).to(x.dtype)


@triton.jit
def with_new_token(
    q, place_of_q, whole, own, kv_head, cos, sin, row, angle_row, d, in_dim,
    kv_heads: tl.constexpr, turned: tl.constexpr,
):  # fmt: skip
    """Queries with the key and value of a new token at `own`; the first `turned` values of queries and key, in two
    halves rotated against each other by the angles of a row."""
    kind = q.dtype
    key = tl.load(own + d, mask=in_dim, other=0.0).to(kind)
    value = tl.load(own + kv_heads * kv_head + d, mask=in_dim, other=0.0).to(kind)
    if turned > 0:
        half: tl.constexpr = turned // 2
        turns = d < turned
        other_half = tl.where(d < half, d + half, d - half)
        sign = tl.where(d < half, -1.0, 1.0)
        angle = row * angle_row + d
        cos_d = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        sin_d = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        swapped = tl.load(
            place_of_q + other_half[None, :], mask=whole & turns[None, :], other=0.0
        ).to(kind)
        q = _turned(q, swapped, cos_d[None, :], sin_d[None, :], sign[None, :])
        swapped_key = tl.load(own + other_half, mask=turns, other=0.0).to(kind)
        key = _turned(key, swapped_key, cos_d, sin_d, sign)
    return q, key, value


@triton.jit
def capped(score, softcap):
    """tanh(score / softcap) * softcap"""
    return (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0) * softcap


@triton.jit
def scores_of(q, k, scale, softcap, has_softcap: tl.constexpr):
    """The scores of keys."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if has_softcap:
        score = capped(score, softcap)
    return score


@triton.jit
def with_values(m, total, sums, score, v, may_hide_all: tl.constexpr):
    """Adds values to the highest score, sum of weights and weighted sum of values so far. With `may_hide_all`, a row
    may not have seen any so far."""
    top = tl.maximum(m, tl.max(score, 1))
    level = top
    if may_hide_all:
        level = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(score - level[:, None])
    before = tl.exp2(m - level)
    total = total * before + tl.sum(weights, 1)
    sums = tl.dot(weights.to(v.dtype), v, sums * before[:, None], input_precision="ieee")
    return top, total, sums


@triton.jit
def with_sink(m, total, sums, sink):
    """Gives weight to scores that add no value."""
    sink = sink.to(tl.float32) * _LOG2_E
    top = tl.maximum(m, sink)
    before = tl.exp2(m - top)
    return total * before + tl.exp2(sink - top), sums * before[:, None]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """A new token for each row of a table."""

    positions: Tensor
    """[rows]"""
    table: Tensor
    """Of `width` [1] blocks a row."""
    width: Tensor
    writes: bool = True
    """Whether their keys and values are still to be stored, except of rows with the null block."""
    angles: Angles | None = None
    """Cosines and sines [rows, turned dimensions] to rotate queries and keys by, like transformers'
    `apply_rotary_pos_emb`; None where they are rotated."""


class RunWorkspace:
    """Memory for the results of runs of new tokens. All counters are zero between launches."""

    def __init__(self, heads: int, pages: Pages, most_runs: int, device: torch.device) -> None:
        """`most_runs` is the number of runs of the longest sequence."""
        self.most_runs = most_runs
        # More fill the GPU without cutting, see `splits`.
        rows = max(1, MOST_CUT_PAIRS // pages.kv_heads)
        runs = rows * heads * most_runs
        self.partial = torch.empty(runs * padded(pages.dim), device=device)
        self.stats = torch.empty(runs * 2, device=device)
        self.done = torch.zeros(rows * pages.kv_heads, dtype=torch.int32, device=device)


def splits(rows: int, kv_heads: int) -> int:
    """Number of programs for the runs of a sequence."""
    pairs = rows * kv_heads
    return min(MOST_SPLITS, PROGRAMS // pairs) if pairs <= MOST_CUT_PAIRS else 1


def padded(dim: int) -> int:
    """The size of a product's operand with rows of `dim` values."""
    return max(LEAST_SIZE, int(triton.next_power_of_2(dim)))


def arguments(
    queries: Tensor,
    kv: Tensor,
    places: Tensor,
    table: Tensor,
    width: Tensor,
    pages: Pages,
    layer: int,
    rule: Rule,
    output: Tensor,
    workspace: RunWorkspace | None = None,
    angles: Angles | None = None,
) -> tuple[Any, ...]:
    """Those of kernels that may have new tokens, up to the window."""
    cos, sin = angles or (queries, queries)
    return (
        queries,
        kv,
        cos,
        sin,
        places,
        table,
        width,
        pages.pool,
        output,
        workspace.partial if workspace else queries,
        workspace.stats if workspace else queries,
        workspace.done if workspace else queries,
        queries if rule.sinks is None else rule.sinks,
        *pages.strides(layer),
        *queries.stride()[:2],
        *kv.stride()[:2],
        cos.stride(0),
        rule.scale,
        rule.softcap or 1.0,
        rule.window or NO_WINDOW,
    )


def constants(queries: Tensor, pages: Pages, rule: Rule) -> dict[str, Any]:
    """Those of all kernels."""
    heads, dim = queries.shape[1:]
    return {
        "kv_heads": pages.kv_heads,
        "group": heads // pages.kv_heads,
        "dim": dim,
        "padded_dim": padded(dim),
        "block_tokens": pages.block_tokens,
        "has_softcap": rule.softcap is not None,
        "has_sinks": rule.sinks is not None,
    }
