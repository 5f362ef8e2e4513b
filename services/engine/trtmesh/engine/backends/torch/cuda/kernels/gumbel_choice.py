"""The choice of tokens: the highest logit, or the draw of `sampling/draws.py` with the same hashes."""

from __future__ import annotations

from typing import Any, NamedTuple

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
ROW_WARPS = 16
"""Warps of the program for the token of a row."""
NO_LOGIT = -2139095041
"""The key of -inf, see `key_of`."""

_NO_LOGIT = tl.constexpr(NO_LOGIT)
_BLOCK = tl.constexpr(BLOCK)
_AT_ONCE = tl.constexpr(32)
"""Blocks with draws computed at once."""
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
    # The distance to the nearer end, 0 or 1, keeps all bits in float32.
    is_high = (x >> 63) != 0
    near = tl.where(is_high, x ^ 0xFFFFFFFFFFFFFFFF, x) >> 12
    high = (near >> 20).to(tl.uint32).to(tl.float32) * 2.3283064365386963e-10
    low = ((near & 0xFFFFF).to(tl.uint32).to(tl.float32) + 0.5) * 2.220446049250313e-16
    distance = high + low
    series = distance * (1 + distance * (0.5 + distance * (0.33333334 + distance * 0.25)))
    wait = -tl.log(tl.where(is_high, 1 - distance, distance))
    return tl.where(is_high & (distance < 0.03), series, wait)


@triton.jit
def key_of(x):
    """An int32 for a float32, in the same order; equal for both zeros."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


class RowLogits(NamedTuple):
    """A row to choose from, within a kernel; the logits are in `changed` if they are."""

    logits: Any
    changed: Any
    is_changed: Any
    row: Any
    row_stride: Any
    size: Any


@triton.jit
def values_of(source, ids, there):
    """The logits of a row to choose from; -inf where nothing is `there`."""
    if source.is_changed:
        x = tl.load(
            source.changed + source.row * source.size + ids, mask=there, other=float("-inf")
        )
    else:
        x = tl.load(
            source.logits + source.row * source.row_stride + ids, mask=there, other=float("-inf")
        )
        x = x.to(tl.float32)
    return x


@triton.jit
def _best_sum(x, kept, place, temperature, numbers, ids, size):
    """The highest sum of logit / temperature and noise of the kept logits x [blocks, BLOCK], float64, with the lowest
    token; -inf and `size` without any. `numbers` [blocks, 1] are those of the blocks of the tokens `ids`.

    Sums are estimated in float32, and computed for tokens near the highest estimate."""
    words = ids.to(tl.uint64)
    hashes = _hashes(place, numbers.to(tl.uint64) + 0x100000000)
    wait = _estimate(_hashes(place, words))
    wait = tl.where(((words ^ hashes) & (_BLOCK - 1)) == 0, 0.0, wait)
    wait += _estimate(hashes) / _BLOCK
    top = tl.max(tl.where(kept, x, float("-inf")))
    # A winner is at most 44 temperatures below the highest logit, where rounding is less than half of 1e-3.
    sums = _relative(x, top, (1 / temperature).to(tl.float32)) - tl.log(wait)
    sums = tl.where(kept, sums, float("-inf"))
    left = kept & (sums >= tl.max(sums) - 1e-3 - _rounding(top, temperature))
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.zeros((), tl.int32) + size
    token = tl.min(tl.where(left, ids, size))
    while token < size:
        logit = tl.max(tl.where(ids == token, x, float("-inf"))).to(tl.float64)
        word = token.to(tl.uint64)
        shared = _hashes(place, (token // _BLOCK).to(tl.uint64) + 0x100000000)
        later = _exponential(_hashes(place, word))
        later = tl.where(((word ^ shared) & (_BLOCK - 1)) == 0, 0.0, later)
        found = logit / temperature - tl.log(later + _exponential(shared) / _BLOCK)
        winner = tl.where(found > best, token, winner)
        best = tl.where(found > best, found, best)
        left = left & (ids > token)
        token = tl.min(tl.where(left, ids, size))
    return best, winner


@triton.jit
def _relative(x, top, factor):
    return tl.where(x == top, 0.0, (x - top) * factor)


@triton.jit
def _rounding(top, temperature):
    """More than the rounding of two float64 sums near top / temperature, which hides noise where it is large. It is
    finite, and less than what the next lower float32 lacks."""
    return tl.minimum(tl.abs(top) * (1 / temperature).to(tl.float32) * 1e-15, 1e30)


@triton.jit
def blocks_of(source, maxima, blocks, place, padded: tl.constexpr):
    """Of each block of a row, the highest logit, the highest noise, and the logit of its token [padded] float32."""
    numbers = tl.arange(0, padded)
    there = numbers < blocks
    highest = tl.load(maxima + source.row * blocks + numbers, mask=there, other=float("-inf"))
    hashes = _hashes(place, numbers.to(tl.uint64) + 0x100000000)
    noise = -tl.log(_estimate(hashes) / _BLOCK)
    ids = numbers * _BLOCK + (hashes & (_BLOCK - 1)).to(tl.int32)
    own = values_of(source, ids, there & (ids < source.size))
    return highest, noise, own


@triton.jit
def winner_of(
    source, highest, noise, own, peak, least, place, temperature, listed, padded: tl.constexpr
):
    """The token with the highest sum of logit / temperature and noise among those with keys from `least` on. The finite
    `peak`, the highest logit, has such a key. `highest`, `noise` and `own` are those of `blocks_of`; `listed` has room
    for the numbers of all blocks.

    Only blocks with a chance are computed, some at once: no sum exceeds that of the highest logit and the highest
    noise of its block, nor is the winner's below those of the tokens with that noise.
    """
    factor = (1 / temperature).to(tl.float32)
    sums = _relative(own, peak, factor) + noise
    # The noise of the highest logit is at least -4. Estimates are wrong by less than half of 2e-3.
    reached = tl.maximum(tl.max(tl.where(key_of(own) >= least, sums, float("-inf"))), -4.0) - 2e-3
    reached -= _rounding(peak, temperature)
    bounds = _relative(highest, peak, factor) + noise
    likely = (key_of(highest) >= least) & (bounds >= reached)
    places = tl.cumsum(likely.to(tl.int32), 0) - 1
    # Not before all have read the list of the winner before.
    tl.debug_barrier()
    tl.store(listed + places, tl.arange(0, padded), mask=likely)
    tl.debug_barrier()
    count = tl.sum(likely.to(tl.int32))
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.zeros((), tl.int32) + source.size
    for first in range(0, count, _AT_ONCE):
        i = first + tl.arange(0, _AT_ONCE)[:, None]
        there = i < count
        numbers = tl.load(listed + i, mask=there, other=0)
        ids = numbers * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        there = there & (ids < source.size)
        x = values_of(source, ids, there)
        kept = key_of(x) >= least
        found, token = _best_sum(x, kept, place, temperature, numbers, ids, source.size)
        winner = tl.where(found > best, token, winner)
        best = tl.maximum(best, found)
    return winner


@triton.jit
def _parts(
    logits,
    temperatures,
    peaks,
    firsts,
    maxima,
    size,
    row_stride,
    parts,
    blocks,
    part_blocks: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (row, part of the vocabulary). The highest logit with the lowest token; in drawing rows, the highest
    logit of each block."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    numbers = part * part_blocks + tl.arange(0, part_blocks)
    ids = numbers[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    there = ids < size
    x = tl.load(logits + row * row_stride + ids, mask=there, other=float("-inf")).to(tl.float32)
    highest = tl.max(x, 1)
    top = tl.max(highest, 0)
    first = tl.min(tl.min(tl.where(x == top, ids, size), 1), 0)
    broken = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
    at = row * parts + part
    tl.store(peaks + at, tl.where(broken > 0, float("nan"), top))
    tl.store(firsts + at, first)
    if tl.load(temperatures + row) > 0:
        tl.store(maxima + row * blocks + numbers, highest, mask=numbers < blocks)


@triton.jit
def _best(
    logits,
    places,
    temperatures,
    peaks,
    firsts,
    maxima,
    listed,
    tokens,
    size,
    row_stride,
    parts,
    blocks,
    padded_parts: tl.constexpr,
    padded: tl.constexpr,
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
    finite = (top > float("-inf")) & (top < float("inf")) & (broken == 0)
    temperature = tl.load(temperatures + row)
    if finite & (temperature > 0):
        place = tl.load(places + row)
        # Not as a variable, whose 0 the compiler would not know.
        highest, noise, own = blocks_of(
            RowLogits(logits, logits, 0, row, row_stride, size), maxima, blocks, place, padded
        )
        token = winner_of(
            RowLogits(logits, logits, 0, row, row_stride, size), highest, noise, own, top,
            _NO_LOGIT + 1, place, temperature, listed + row * blocks, padded,
        )  # fmt: skip
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))


def choose_tokens(logits: Tensor, places: Tensor, temperatures: Tensor, tokens: Tensor) -> None:
    """Writes `tokens` [rows] int64, NO_TOKEN where the highest of `logits` [rows, vocabulary] is not finite.

    A row of temperature 0 takes the highest logit; other rows draw. `places` [rows] int64 are the hashes of the draws;
    `temperatures` are float64.
    """
    rows, size = logits.shape
    part_size, warps = parts_of(rows)
    parts, blocks = triton.cdiv(size, part_size), triton.cdiv(size, BLOCK)
    peaks = torch.empty(rows * parts, device=logits.device)
    firsts = torch.empty(rows * parts, dtype=torch.int32, device=logits.device)
    maxima = torch.empty(rows * blocks, device=logits.device)
    listed = torch.empty(rows * blocks, dtype=torch.int32, device=logits.device)
    numbers = (size, logits.stride(0), parts, blocks)
    _parts[(rows, parts)](
        logits,
        temperatures,
        peaks,
        firsts,
        maxima,
        *numbers,
        part_blocks=part_size // BLOCK,
        num_warps=warps,
        **overlap(logits.device),
    )
    _best[(rows,)](
        logits,
        places.view(torch.uint64),
        temperatures,
        peaks,
        firsts,
        maxima,
        listed,
        tokens,
        *numbers,
        padded_parts=triton.next_power_of_2(parts),
        padded=triton.next_power_of_2(blocks),
        num_warps=ROW_WARPS,
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
    # The item of a row without a token ends during the host's read.
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
