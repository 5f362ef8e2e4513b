"""Norms, activations and rotations, a kernel each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap

HEADS = 8
"""Heads of a program, in a norm of heads."""
MOST_COLUMNS = 1024
"""Of a program, in an elementwise kernel."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A norm: given / sqrt(mean(given ** 2) + epsilon) * weight; `weight` is float32."""

    weight: Tensor
    epsilon: float


@triton.jit
def _norm(
    given,
    weight,
    added,
    output,
    epsilon,
    size,
    columns: tl.constexpr,
    adds: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, columns)
    there = at < size
    w = tl.load(weight + at, mask=there, other=0.0)
    if overlaps:
        gdc_wait()
    x = tl.load(given + row * size + at, mask=there, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon) * w
    if adds:
        y += tl.load(added + row * size + at, mask=there, other=0.0).to(tl.float32)
    tl.store(output + row * size + at, y.to(output.dtype.element_ty), mask=there)


def norm(given: Tensor, weight: Tensor, epsilon: float, added: Tensor | None = None) -> Tensor:
    """given / sqrt(mean(given ** 2) + epsilon) * weight over the last dimension, plus `added`; `weight` is float32."""
    size = given.shape[-1]
    given = given.contiguous()
    output = torch.empty_like(given)
    columns = triton.next_power_of_2(size)
    warps = 4 if columns <= 4096 else 8
    _norm[(given.numel() // size,)](
        given,
        weight,
        given if added is None else added.contiguous(),
        output,
        epsilon,
        size,
        columns=columns,
        adds=added is not None,
        num_warps=warps,
        **overlap(given.device),
    )
    return output


def norm_reference(given: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = given.double()
    length = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * length * weight.double()).to(given.dtype)


@triton.jit
def _norm_heads(
    heads,
    of_queries,
    of_keys,
    token_stride,
    head_stride,
    epsilon,
    queries,
    count,
    dim,
    at_once: tl.constexpr,
    columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (token, `at_once` heads)."""
    if overlaps:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * at_once + tl.arange(0, at_once))[:, None]
    d = tl.arange(0, columns)[None, :]
    w = tl.where(
        h < queries,
        tl.load(of_queries + d, mask=d < dim, other=0.0),
        tl.load(of_keys + d, mask=d < dim, other=0.0),
    )
    if overlaps:
        gdc_wait()
    there = (h < count) & (d < dim)
    place = heads + token * token_stride + h * head_stride + d
    x = tl.load(place, mask=there, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / dim + epsilon)[:, None] * w
    tl.store(place, y.to(heads.dtype.element_ty), mask=there)


def norm_heads(heads: Tensor, queries: int, of_queries: Scale, of_keys: Scale) -> None:
    """Replaces `heads` [tokens, heads, dim] by their norms, `of_queries` the first `queries` heads and `of_keys` the
    others. The norms have one epsilon."""
    tokens, count, dim = heads.shape
    _norm_heads[(tokens, triton.cdiv(count, HEADS))](
        heads,
        of_queries.weight,
        of_keys.weight,
        heads.stride(0),
        heads.stride(1),
        of_queries.epsilon,
        queries,
        count,
        dim,
        at_once=HEADS,
        columns=triton.next_power_of_2(dim),
        **overlap(heads.device),
    )


@triton.jit
def _gated_silu(both, output, size, columns: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * columns + tl.arange(0, columns)
    there = at < size
    gate = tl.load(both + row * 2 * size + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + at, mask=there, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * size + at, y.to(output.dtype.element_ty), mask=there)


def gated_silu(both: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension."""
    size = both.shape[-1] // 2
    both = both.contiguous()
    output = both.new_empty(*both.shape[:-1], size)
    columns = min(MOST_COLUMNS, triton.next_power_of_2(size))
    _gated_silu[(output.numel() // size, triton.cdiv(size, columns))](
        both, output, size, columns=columns, **overlap(both.device)
    )
    return output


@triton.jit
def _turn(
    heads,
    cos,
    sin,
    token_stride,
    head_stride,
    angle_stride,
    count,
    half,
    padded_count: tl.constexpr,
    padded_half: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, padded_count)
    d = tl.arange(0, padded_half)
    in_half = d < half
    there = (h < count)[:, None] & in_half[None, :]
    place = heads + token * token_stride + h[:, None] * head_stride + d[None, :]
    a = tl.load(place, mask=there, other=0.0).to(tl.float32)
    b = tl.load(place + half, mask=there, other=0.0).to(tl.float32)
    angle = token * angle_stride + d
    cos_a = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + angle + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + angle + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    kind = heads.dtype.element_ty
    tl.store(place, (a * cos_a - b * sin_a).to(kind), mask=there)
    tl.store(place + half, (b * cos_b + a * sin_b).to(kind), mask=there)


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates `heads` [tokens, heads, dim] in place by `cos` and `sin` [tokens, turned dimensions], as transformers'
    `apply_rotary_pos_emb`."""
    tokens, count, _ = heads.shape
    half = cos.shape[1] // 2
    _turn[(tokens,)](
        heads,
        cos,
        sin,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        count,
        half,
        padded_count=triton.next_power_of_2(count),
        padded_half=triton.next_power_of_2(half),
        # The same rounding as within attention.
        enable_fp_fusion=False,
        **overlap(heads.device),
    )
