"""The choice of tokens: the highest logit, or the draw of `sampling/draws.py` with the same hashes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap
from trtmesh.engine.backends.torch.sampling.draws import BLOCK

PARTS = ((8, 2048, 8), (1 << 30, 2048, 4))
"""By the most rows: tokens and warps of a program."""
PART = PARTS[0][1]
KNOWN = 256
"""Rows of a program of `known_tokens`."""


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _exponential(x):
    return -tl.log(((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit
def _hashes(place, words):
    return _mix((place ^ words) + 0x9E3779B97F4A7C15)


@triton.jit
def _estimate(x):
    """`_exponential` in float32, with an error of a few units in the last place."""
    # From the nearer end: there a number has all its bits.
    is_high = (x >> 63) != 0
    near = tl.where(is_high, x ^ 0xFFFFFFFFFFFFFFFF, x) >> 12
    high = (near >> 20).to(tl.uint32).to(tl.float32) * 2.3283064365386963e-10
    low = ((near & 0xFFFFF).to(tl.uint32).to(tl.float32) + 0.5) * 2.220446049250313e-16
    distance = high + low
    series = distance * (1 + distance * (0.5 + distance * (0.33333334 + distance * 0.25)))
    wait = -tl.log(tl.where(is_high, 1 - distance, distance))
    return tl.where(is_high & (distance < 0.03), series, wait)


@triton.jit
def best_sum(x, kept, place, temperature, numbers, ids, size, block: tl.constexpr):
    """The highest sum of logit / temperature and noise of the kept logits x [blocks, block], float64, with the lowest
    token; -inf and `size` without any. `numbers` [blocks, 1] are those of the blocks of the tokens `ids`.

    Sums are estimated in float32, and computed for tokens near the highest estimate."""
    words = ids.to(tl.uint64)
    hashes = _hashes(place, numbers.to(tl.uint64) + 0x100000000)
    wait = _estimate(_hashes(place, words))
    wait = tl.where(((words ^ hashes) & (block - 1)) == 0, 0.0, wait) + _estimate(hashes) / block
    top = tl.max(tl.where(kept, x, float("-inf")))
    # Of a row without a finite highest logit any token will do.
    top = tl.minimum(tl.maximum(top, -3e38), 3e38)
    # A winner is at most 44 temperatures below the highest logit, where rounding is less than half of 1e-3.
    sums = tl.where(x == top, 0.0, (x - top) * (1 / temperature).to(tl.float32)) - tl.log(wait)
    sums = tl.where(kept, sums, float("-inf"))
    left = kept & (sums >= tl.max(sums) - 1e-3)
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.zeros((), tl.int32) + size
    token = tl.min(tl.where(left, ids, size))
    while token < size:
        logit = tl.max(tl.where(ids == token, x, float("-inf"))).to(tl.float64)
        word = token.to(tl.uint64)
        shared = _hashes(place, (token // block).to(tl.uint64) + 0x100000000)
        later = _exponential(_hashes(place, word))
        later = tl.where(((word ^ shared) & (block - 1)) == 0, 0.0, later)
        found = logit / temperature - tl.log(later + _exponential(shared) / block)
        winner = tl.where(found > best, token, winner)
        best = tl.where(found > best, found, best)
        left = left & (ids > token)
        token = tl.min(tl.where(left, ids, size))
    return best, winner


@triton.jit
def _parts(
    logits,
    places,
    temperatures,
    lowest,
    peaks,
    firsts,
    sums,
    winners,
    size,
    row_stride,
    parts,
    blocks: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (row, part of the vocabulary). The highest logit with the token; in drawing rows, the highest sum of
    logit / temperature and noise, with the token. The lowest token among equals."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    numbers = part * blocks + tl.arange(0, blocks)[:, None]
    ids = numbers * block + tl.arange(0, block)[None, :]
    there = ids < size
    x = tl.load(logits + row * row_stride + ids, mask=there, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.max(x, 1), 0)
    first = tl.min(tl.min(tl.where(x == top, ids, size), 1), 0)
    broken = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
    at = row * parts + part
    tl.store(peaks + at, tl.where(broken > 0, float("nan"), top))
    tl.store(firsts + at, first)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        kept = there & (x.to(tl.float64) >= tl.load(lowest + row))
        best, winner = best_sum(
            x, kept, tl.load(places + row), temperature, numbers, ids, size, block
        )
        tl.store(sums + at, best)
        tl.store(winners + at, winner)


@triton.jit
def _best(
    temperatures,
    peaks,
    firsts,
    sums,
    winners,
    tokens,
    parts,
    padded_parts: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: a row. No token where a logit is not a number, or the highest is infinite."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded_parts)
    there = i < parts
    at = row * parts + i
    peak = tl.load(peaks + at, mask=there, other=float("-inf"))
    top = tl.max(peak, 0)
    broken = tl.max((peak != peak).to(tl.int32), 0) > 0
    none = 2147483647
    first = tl.load(firsts + at, mask=there, other=none)
    token = tl.min(tl.where(there & (peak == top), first, none), 0)
    if tl.load(temperatures + row) > 0:
        total = tl.load(sums + at, mask=there, other=float("-inf"))
        best = tl.max(total, 0)
        winner = tl.load(winners + at, mask=there, other=none)
        token = tl.min(tl.where(there & (total == best), winner, none), 0)
    finite = (top > float("-inf")) & (top < float("inf")) & (broken == 0)
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))


def choose_tokens(
    logits: Tensor, places: Tensor, temperatures: Tensor, lowest: Tensor, tokens: Tensor
) -> None:
    """Writes `tokens` [rows] int64, NO_TOKEN where the highest of `logits` [rows, vocabulary] is not finite.

    A row of temperature 0 takes the highest logit; other rows draw among the logits from `lowest` on. `places` [rows]
    int64 are the hashes of the draws; `temperatures` and `lowest` are float64.
    """
    rows, size = logits.shape
    part_size, warps = parts_of(rows)
    parts = triton.cdiv(size, part_size)
    peaks = torch.empty(rows * parts, device=logits.device)
    firsts = torch.empty(rows * parts, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows * parts, dtype=torch.float64, device=logits.device)
    winners = torch.empty_like(firsts)
    _parts[(rows, parts)](
        logits,
        places.view(torch.uint64),
        temperatures,
        lowest,
        peaks,
        firsts,
        sums,
        winners,
        size,
        logits.stride(0),
        parts,
        blocks=part_size // BLOCK,
        block=BLOCK,
        num_warps=warps,
        **overlap(logits.device),
    )
    _best[(rows,)](
        temperatures,
        peaks,
        firsts,
        sums,
        winners,
        tokens,
        parts,
        padded_parts=triton.next_power_of_2(parts),
        **overlap(logits.device),
    )


def parts_of(rows: int) -> tuple[int, int]:
    """Tokens and warps of a program."""
    return next((size, warps) for most, size, warps in PARTS if rows <= most)


@triton.jit
def _known(given, chosen, output, rows, block: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * block + tl.arange(0, block)
    there = row < rows
    token = tl.load(given + row, mask=there, other=0)
    source = tl.where(token < 0, -1 - token, 0)
    # The item of a row without a token ends when the host reads it.
    found = tl.maximum(tl.load(chosen + source, mask=there & (token < 0), other=0), 0)
    tl.store(output + row, tl.where(token < 0, found, token), mask=there)


def known_tokens(given: Tensor, chosen: Tensor) -> Tensor:
    """The tokens [rows] int64 of `given`, where -1 - row stands for the token of a row of `chosen`, or 0 for
    NO_TOKEN."""
    output = torch.empty_like(given)
    _known[(triton.cdiv(len(given), KNOWN),)](
        given, chosen, output, len(given), block=KNOWN, **overlap(given.device)
    )
    return output
