"""The choice of tokens for rows with rules: biases, penalties, bans, filters and log-probabilities.

A row has a column of words, see `row_fields.Field`. Kernels of a row without rules return at once. The lowest kept
logit of top_k and top_p, as `sampling/filters.py` defines it, is found without sorting a row:

1. `_survey` applies biases, penalties and bans, and finds the range of the logits.
2. `_narrow`, twice: sums over the tokens above a few pivots narrow the range around the bound. These sums are rounded.
3. `_collect` adds up exact weights above and in the range, and lists the tokens in the range.
4. `_bound` finds the bound among the listed tokens by halving. Where the exact sums say that the bound is elsewhere, or
   where the list is full, it searches the whole row.
5. `_draw` and `_best` choose as `gumbel_choice.py` does, among the kept tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import PART, best_sum, parts_of
from trtmesh.engine.backends.torch.cuda.kernels.overlap import overlap
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import (
    BIAS_SHIFT,
    BIASES,
    COUNT_SHIFT,
    MOST_TOPS,
    Field,
    Flag,
)
from trtmesh.engine.backends.torch.sampling.draws import BLOCK

PIVOTS = 16
"""So many that even of a flat row no more tokens are in the range than are listed."""
LISTED = 8192
"""Most tokens listed of a row."""
AT_ONCE = 8192
"""Tokens of a row searched at once."""
TOTALS = 2
"""Sums of weights of a program: of all tokens, and above the range."""

_FLAGS = tl.constexpr(int(Field.FLAGS))
_SLOT = tl.constexpr(int(Field.SLOT))
_PLACE = tl.constexpr(int(Field.PLACE))
_TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
_TOP_K = tl.constexpr(int(Field.TOP_K))
_TOP_P = tl.constexpr(int(Field.TOP_P))
_DEPTH = tl.constexpr(int(Field.DEPTH))
_REPETITION = tl.constexpr(int(Field.REPETITION))
_PRESENCE = tl.constexpr(int(Field.PRESENCE))
_FREQUENCY = tl.constexpr(int(Field.FREQUENCY))
_TOPS = tl.constexpr(int(Field.TOPS))
_CHANGES = tl.constexpr(int(Flag.CHANGES))
_DRAWS = tl.constexpr(int(Flag.DRAWS))
_BANS_ENDS = tl.constexpr(int(Flag.BANS_ENDS))
_COUNTS = tl.constexpr(int(Flag.COUNTS))
_LOG_PROBS = tl.constexpr(int(Flag.LOG_PROBS))
_BIAS_SHIFT = tl.constexpr(BIAS_SHIFT)
_COUNT_SHIFT = tl.constexpr(COUNT_SHIFT)
_ONE_MORE = tl.constexpr(1 << COUNT_SHIFT)
_BIASES = tl.constexpr(BIASES)
_PIVOTS = tl.constexpr(PIVOTS)
_LISTED = tl.constexpr(LISTED)
_AT_ONCE = tl.constexpr(AT_ONCE)
_MOST_TOPS = tl.constexpr(MOST_TOPS)
_TOTALS = tl.constexpr(TOTALS)


@triton.jit
def _word(fields, stride, row, field: tl.constexpr):
    return tl.load(fields + field * stride + row)


@triton.jit
def _number(fields, stride, row, field: tl.constexpr):
    return tl.load(fields + field * stride + row).to(tl.float64, bitcast=True)


@triton.jit
def _values(logits, changed, flags, row, row_stride, size, ids):
    """The logits to choose from, -inf beyond the vocabulary."""
    there = ids < size
    if (flags & _CHANGES) != 0:
        x = tl.load(changed + row * size + ids, mask=there, other=float("-inf"))
    else:
        x = tl.load(logits + row * row_stride + ids, mask=there, other=float("-inf"))
        x = x.to(tl.float32)
    return x


@triton.jit
def _weights(x, peak, temperature):
    """Multiples of 2**-40."""
    factor = tl.minimum(1 / temperature, 1.7976931348623157e308)
    distance = (x.to(tl.float64) - peak.to(tl.float64)) * factor
    return (tl.exp(distance) * 1099511627776.0).to(tl.int64)


@triton.jit
def _highest(peaks, row, parts, padded: tl.constexpr):
    i = tl.arange(0, padded)
    return tl.max(tl.load(peaks + row * parts + i, mask=i < parts, other=float("-inf")), 0)


@triton.jit
def _survey(
    logits,
    row_stride,
    size,
    fields,
    stride,
    words,
    biases,
    changed,
    own_peaks,
    own_sums,
    peaks,
    firsts,
    lows,
    counts,
    top_logits,
    top_ids,
    parts,
    part_size: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (row, part). Changed logits; the highest with the lowest token, and the lowest finite one; of the
    model's own logits, the highest, the sum of exp, and the most likely tokens."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    flags = _word(fields, stride, row, _FLAGS)
    if flags == 0:
        return
    at = row * parts + part
    if part == 0:
        tl.store(counts + row, 0)
    ids = part * part_size + tl.arange(0, part_size)
    there = ids < size
    x = tl.load(logits + row * row_stride + ids, mask=there, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    tl.store(own_peaks + at, tl.where(broken, float("nan"), top))
    if (flags & _LOG_PROBS) != 0:
        tl.store(own_sums + at, tl.sum(tl.exp(x - tl.maximum(top, -3.0e38)), 0))
        rest = x
        for place in range(_word(fields, stride, row, _TOPS)):
            best = tl.max(rest, 0)
            first = tl.min(tl.where(rest == best, ids, 2147483647), 0)
            tl.store(top_logits + at * _MOST_TOPS + place, best)
            tl.store(top_ids + at * _MOST_TOPS + place, first)
            rest = tl.where(ids == first, float("-inf"), rest)
    if (flags & _CHANGES) != 0:
        slot = _word(fields, stride, row, _SLOT)
        word = tl.load(words + slot * size + ids, mask=there, other=0)
        bias = (word >> _BIAS_SHIFT) & (_BIASES - 1)
        x += tl.load(biases + slot * _BIASES + bias, mask=bias > 0, other=0.0)
        factor = _number(fields, stride, row, _REPETITION).to(tl.float32)
        count = word >> _COUNT_SHIFT
        wide = count.to(tl.float64) * _number(fields, stride, row, _FREQUENCY)
        wide += (count > 0).to(tl.float64) * _number(fields, stride, row, _PRESENCE)
        factors = tl.zeros_like(x) + factor
        y = tl.where(x > 0, tl.div_rn(x, factors), x * factors) - wide.to(tl.float32)
        x = tl.where((word & 1) != 0, y, x)
        banned = (word & 2) != 0
        if (flags & _BANS_ENDS) != 0:
            banned = (word & 6) != 0
        x = tl.where(banned, float("-inf"), x)
        tl.store(changed + row * size + ids, x, mask=there)
        top = tl.max(x, 0)
    tl.store(peaks + at, top)
    tl.store(firsts + at, tl.min(tl.where(x == top, ids, size), 0))
    tl.store(lows + at, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))


@triton.jit
def _range(fields, stride, row, peaks, lows, parts, padded: tl.constexpr):
    """The range of logits which the bound is in: whether it counts tokens, the lowest and the highest."""
    i = tl.arange(0, padded)
    high = _highest(peaks, row, parts, padded)
    low = tl.min(tl.load(lows + row * parts + i, mask=i < parts, other=float("inf")), 0)
    counts = _word(fields, stride, row, _TOP_K) > 0
    if counts == 0:
        # Weights below are 0.
        temperature = _number(fields, stride, row, _TEMPERATURE).to(tl.float32)
        low = tl.maximum(low, high - 28.0 * temperature)
    return counts, low, high


@triton.jit
def _reached(masses, row, parts, padded: tl.constexpr):
    """The sums [PIVOTS] above the pivots."""
    i = tl.arange(0, padded)[:, None]
    j = tl.arange(0, _PIVOTS)[None, :]
    at = (row * parts + i) * _PIVOTS + j
    return tl.sum(tl.load(masses + at, mask=i < parts, other=0.0), 0)


@triton.jit
def _narrowed(reached, needed, low, high, top):
    """The range between the pivots around `needed`, from `low` and below `top`; pivots are from `low` to `high`."""
    pivots = low + (high - low) / _PIVOTS * tl.arange(0, _PIVOTS)
    slack = needed * 1e-5
    below = tl.max(tl.where(reached >= needed + slack, pivots, low), 0)
    above = tl.min(tl.where(reached < needed - slack, pivots, top), 0)
    return below, above


@triton.jit
def _needed(fields, stride, row, counts, reached):
    """The rounded sum from the bound on, from the sums of the first pivots."""
    share = _number(fields, stride, row, _TOP_P).to(tl.float32)
    return tl.where(
        counts, _word(fields, stride, row, _TOP_K).to(tl.float32), share * tl.max(reached, 0)
    )


@triton.jit
def _narrow(
    logits,
    row_stride,
    size,
    fields,
    stride,
    changed,
    peaks,
    lows,
    first_masses,
    masses,
    parts,
    second: tl.constexpr,
    part_size: tl.constexpr,
    padded: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (row, part). The sums above pivots, of counts or weights. With `second`, the pivots lie between two of
    the first."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    flags = _word(fields, stride, row, _FLAGS)
    if flags == 0:
        return
    if (_word(fields, stride, row, _TOP_K) == 0) & (_number(fields, stride, row, _TOP_P) >= 1):
        return
    counts, low, high = _range(fields, stride, row, peaks, lows, parts, padded)
    ids = part * part_size + tl.arange(0, part_size)
    x = _values(logits, changed, flags, row, row_stride, size, ids)
    if counts:
        measure = tl.where(x > float("-inf"), 1.0, 0.0)
    else:
        temperature = _number(fields, stride, row, _TEMPERATURE).to(tl.float32)
        measure = tl.exp2((x - high) * (1.4426950408889634 / temperature))
    if second:
        reached = _reached(first_masses, row, parts, padded)
        needed = _needed(fields, stride, row, counts, reached)
        low, top = _narrowed(reached, needed, low, high, float("inf"))
        high = tl.minimum(top, high)
    at = (row * parts + part) * _PIVOTS
    for j in tl.static_range(_PIVOTS):
        pivot = low + (high - low) / _PIVOTS * j
        tl.store(masses + at + j, tl.sum(tl.where(x >= pivot, measure, 0.0), 0))


@triton.jit
def _collect(
    logits,
    row_stride,
    size,
    fields,
    stride,
    changed,
    peaks,
    lows,
    first_masses,
    masses,
    totals,
    listed,
    listed_weights,
    counts,
    parts,
    part_size: tl.constexpr,
    padded: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (row, part). Lists the tokens within the range, with their weights. `totals` [rows, parts, 2] are the
    sums of all weights, and of those above the range."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    flags = _word(fields, stride, row, _FLAGS)
    if flags == 0:
        return
    share = _number(fields, stride, row, _TOP_P)
    if (_word(fields, stride, row, _TOP_K) == 0) & (share >= 1):
        return
    is_counted, low, high = _range(fields, stride, row, peaks, lows, parts, padded)
    reached = _reached(first_masses, row, parts, padded)
    needed = _needed(fields, stride, row, is_counted, reached)
    low, top = _narrowed(reached, needed, low, high, float("inf"))
    reached = _reached(masses, row, parts, padded)
    low, top = _narrowed(reached, needed, low, tl.minimum(top, high), top)
    # top_p may bound more among counted tokens.
    top = tl.where(is_counted, float("inf"), top)
    ids = part * part_size + tl.arange(0, part_size)
    x = _values(logits, changed, flags, row, row_stride, size, ids)
    inside = (x >= low) & (x < top) & (ids < size)
    weights = tl.zeros_like(ids).to(tl.int64)
    if share < 1:
        temperature = _number(fields, stride, row, _TEMPERATURE)
        weights = _weights(x, high, temperature)
        at = (row * parts + part) * _TOTALS
        tl.store(totals + at, tl.sum(weights, 0))
        tl.store(totals + at + 1, tl.sum(tl.where(x >= top, weights, 0), 0))
    found = tl.sum(inside.to(tl.int32), 0)
    if found > 0:
        first = tl.atomic_add(counts + row, found)
        places = first + tl.cumsum(inside.to(tl.int32), 0) - 1
        kept = inside & (places < _LISTED)
        tl.store(listed + row * _LISTED + places, x, mask=kept)
        tl.store(listed_weights + row * _LISTED + places, weights, mask=kept)


@triton.jit
def _key(x):
    """An integer for a number, in the same order; equal for both zeros."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _sweep(keys, weights, there, middle):
    """The sum of weights from the key `middle` on, the lowest key from there, and the highest below."""
    above = there & (keys >= middle)
    mass = tl.sum(tl.where(above, weights, 0), 0)
    up = tl.min(tl.where(above, keys, 4294967296), 0)
    return mass, up, tl.max(tl.where(there & (keys < middle), keys, -4294967296), 0)


@triton.jit
def _among_listed(keys, weights, there, above, needed, end):
    """The highest key, below `end`, from which on weights sum up to `needed` together with `above`; that of the lowest
    where all do not."""
    mass, low, _ = _sweep(keys, weights, there, -4294967296)
    while end - low > 1:
        middle = (low + end) >> 1
        mass, up, down = _sweep(keys, weights, there, middle)
        if (above + mass).to(tl.float64) >= needed:
            low = tl.minimum(up, end - 1)
        else:
            end = tl.maximum(down + 1, low + 1)
    return low


@triton.jit
def _sweep_row(
    logits,
    changed,
    flags,
    row,
    row_stride,
    size,
    peak,
    temperature,
    is_counted,
    least,
    middle,
    at_once: tl.constexpr,
):
    """`_sweep` of the tokens of a row with keys from `least` on; the weights of counted tokens are 1."""
    mass = tl.zeros((), tl.int64)
    up = tl.zeros((), tl.int64) + 4294967296
    down = tl.zeros((), tl.int64) - 4294967296
    for first in range(0, size, at_once):
        x = _values(logits, changed, flags, row, row_stride, size, first + tl.arange(0, at_once))
        weights = tl.full([at_once], 1, tl.int64)
        if is_counted == 0:
            weights = _weights(x, peak, temperature)
        keys = _key(x)
        there = (x > float("-inf")) & (keys >= least)
        mass_here, up_here, down_here = _sweep(keys, weights, there, middle)
        mass += mass_here
        up = tl.minimum(up, up_here)
        down = tl.maximum(down, down_here)
    return mass, up, down


@triton.jit
def _bound(
    logits,
    row_stride,
    size,
    fields,
    stride,
    changed,
    peaks,
    totals,
    listed,
    listed_weights,
    counts,
    lowest,
    parts,
    padded: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: a row. The lowest kept logit, float64."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    flags = _word(fields, stride, row, _FLAGS)
    if flags == 0:
        return
    temperature = _number(fields, stride, row, _TEMPERATURE)
    top_k = _word(fields, stride, row, _TOP_K)
    share = _number(fields, stride, row, _TOP_P)
    peak = _highest(peaks, row, parts, padded)
    end = _key(peak) + 1
    none = tl.zeros((), tl.int64) - 4294967296
    least = none
    if (top_k > 0) | (share < 1):
        # First the bound of top_k, then that of top_p among the tokens left.
        at = (row * parts + tl.arange(0, padded)) * _TOTALS
        in_row = tl.arange(0, padded) < parts
        total = tl.sum(tl.load(totals + at, mask=in_row, other=0), 0)
        count = tl.load(counts + row)
        whole = count > _LISTED
        if whole == 0:
            i = tl.arange(0, _LISTED)
            there = i < count
            x = tl.load(listed + row * _LISTED + i, mask=there, other=float("-inf"))
            weights = tl.load(listed_weights + row * _LISTED + i, mask=there, other=0)
            keys = _key(x)
            above = tl.sum(tl.load(totals + at + 1, mask=in_row, other=0), 0)
            mass = tl.sum(weights, 0)
            if top_k > 0:
                if count >= top_k:
                    ones = there.to(tl.int64)
                    least = _among_listed(keys, ones, there, above * 0, top_k.to(tl.float64), end)
                there = there & (keys >= least)
                mass = tl.sum(tl.where(there, weights, 0), 0)
                total = mass
                above = mass * 0
            if share < 1:
                needed = share * total.to(tl.float64)
                whole = ((above > 0) & (above.to(tl.float64) >= needed)) | (
                    (above + mass).to(tl.float64) < needed
                )
                if whole == 0:
                    least = _among_listed(keys, weights, there, above, needed, end)
        if whole:
            least = none
            for stage in range(2):
                is_counted = stage == 0
                if (is_counted & (top_k > 0)) | ((stage == 1) & (share < 1)):
                    mass, low, _ = _sweep_row(
                        logits, changed, flags, row, row_stride, size, peak, temperature,
                        is_counted, least, none, _AT_ONCE,
                    )  # fmt: skip
                    needed = top_k.to(tl.float64)
                    if stage == 1:
                        needed = share * mass.to(tl.float64)
                    if mass.to(tl.float64) >= needed:
                        high = end
                        while high - low > 1:
                            middle = (low + high) >> 1
                            mass, up, down = _sweep_row(
                                logits, changed, flags, row, row_stride, size, peak, temperature,
                                is_counted, least, middle, _AT_ONCE,
                            )  # fmt: skip
                            if mass.to(tl.float64) >= needed:
                                low = tl.minimum(up, high - 1)
                            else:
                                high = tl.maximum(down + 1, low + 1)
                        least = low
    bits = least.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bound = tl.where(least == none, float("-inf"), bits.to(tl.float32, bitcast=True))
    depth = _number(fields, stride, row, _DEPTH)
    tl.store(lowest + row, tl.maximum(bound.to(tl.float64), depth + peak.to(tl.float64)))


@triton.jit
def _draw(
    logits,
    row_stride,
    size,
    fields,
    stride,
    changed,
    lowest,
    sums,
    winners,
    parts,
    blocks: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (row, part). The highest sum of logit / temperature and noise of a kept token."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    flags = _word(fields, stride, row, _FLAGS)
    if (flags & _DRAWS) == 0:
        return
    numbers = part * blocks + tl.arange(0, blocks)[:, None]
    ids = numbers * block + tl.arange(0, block)[None, :]
    x = _values(logits, changed, flags, row, row_stride, size, ids)
    kept = (x > float("-inf")) & (x.to(tl.float64) >= tl.load(lowest + row))
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.zeros((), tl.int32) + size
    if tl.max(kept.to(tl.int32)) > 0:
        place = _word(fields, stride, row, _PLACE).to(tl.uint64, bitcast=True)
        temperature = _number(fields, stride, row, _TEMPERATURE)
        best, winner = best_sum(x, kept, place, temperature, numbers, ids, size, block)
    tl.store(sums + row * parts + part, best)
    tl.store(winners + row * parts + part, winner)


@triton.jit
def _best(
    logits,
    row_stride,
    size,
    fields,
    stride,
    words,
    own_peaks,
    own_sums,
    peaks,
    firsts,
    top_logits,
    top_ids,
    sums,
    winners,
    tokens,
    log_probs,
    parts,
    padded: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: a row. The token is -1 where one of the model's own logits is not a number or the highest is infinite,
    and -2 where nothing is left to choose. Counts the token."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    flags = _word(fields, stride, row, _FLAGS)
    if flags == 0:
        return
    i = tl.arange(0, padded)
    there = i < parts
    at = row * parts + i
    own = tl.load(own_peaks + at, mask=there, other=float("-inf"))
    own_top = tl.max(own, 0)
    broken = tl.max((own != own).to(tl.int32), 0) > 0
    peak = tl.load(peaks + at, mask=there, other=float("-inf"))
    top = tl.max(peak, 0)
    none = 2147483647
    first = tl.load(firsts + at, mask=there, other=none)
    token = tl.min(tl.where(there & (peak == top), first, none), 0)
    if (flags & _DRAWS) != 0:
        total = tl.load(sums + at, mask=there, other=float("-inf"))
        best = tl.max(total, 0)
        winner = tl.load(winners + at, mask=there, other=none)
        token = tl.min(tl.where(there & (total == best), winner, none), 0)
    finite = (top > float("-inf")) & (top < float("inf"))
    token = tl.where(finite, token, -2)
    own_finite = (own_top > float("-inf")) & (own_top < float("inf")) & (broken == 0)
    token = tl.where(own_finite, token, -1)
    tl.store(tokens + row, token.to(tl.int64))
    if ((flags & _COUNTS) != 0) & (token >= 0):
        counted = words + _word(fields, stride, row, _SLOT) * size + token
        tl.store(counted, (tl.load(counted) | 1) + _ONE_MORE)
    if ((flags & _LOG_PROBS) != 0) & (token >= 0):
        wide = own_top.to(tl.float64)
        part_sums = tl.load(own_sums + at, mask=there, other=0.0)
        part_sums *= tl.exp(own.to(tl.float64) - wide)
        total_log = wide + tl.log(tl.sum(part_sums, 0))
        line = log_probs + row * (2 * _MOST_TOPS + 1)
        chosen = tl.load(logits + row * row_stride + token).to(tl.float64)
        tl.store(line, chosen - total_log)
        j = tl.arange(0, _MOST_TOPS)
        wanted = _word(fields, stride, row, _TOPS)
        ranks = at[:, None] * _MOST_TOPS + j[None, :]
        known = there[:, None] & (j[None, :] < wanted)
        rest = tl.load(top_logits + ranks, mask=known, other=float("-inf"))
        ids = tl.load(top_ids + ranks, mask=known, other=none)
        for place in range(wanted):
            most = tl.max(tl.max(rest, 1), 0)
            next_id = tl.min(tl.min(tl.where(rest == most, ids, none), 1), 0)
            tl.store(line + 1 + 2 * place, next_id.to(tl.float64))
            tl.store(line + 2 + 2 * place, most.to(tl.float64) - total_log)
            rest = tl.where(ids == next_id, float("-inf"), rest)


class Workspace:
    """Memory of the choice: of each slot, what is known of its tokens, and of each row, what kernels tell each other.
    Steps in the same stream share it."""

    def __init__(self, slots: int, rows: int, vocabulary: int, device: torch.device) -> None:
        parts = triton.cdiv(vocabulary, PART)

        def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.words = memory(slots, vocabulary, dtype=torch.int32)
        """What is known of each token, see Word."""
        self.biases = memory(slots, BIASES)
        """From index 1 on."""
        self.changed = memory(rows, vocabulary)
        self.own_peaks, self.own_sums, self.peaks, self.lows = memory(4, rows * parts).unbind()
        self.sums = memory(rows * parts, dtype=torch.float64)
        self.firsts, self.winners = memory(2, rows * parts, dtype=torch.int32).unbind()
        self.top_logits = memory(rows * parts * MOST_TOPS)
        self.top_ids = memory(rows * parts * MOST_TOPS, dtype=torch.int32)
        self.first_masses, self.masses = memory(2, rows * parts * PIVOTS).unbind()
        self.totals = memory(rows * parts, TOTALS, dtype=torch.int64)
        self.listed = memory(rows, LISTED)
        self.listed_weights = memory(rows, LISTED, dtype=torch.int64)
        self.counts = memory(rows, dtype=torch.int32)
        self.lowest = memory(rows, dtype=torch.float64)


def choose_by_rules(
    logits: Tensor, fields: Tensor, work: Workspace, tokens: Tensor, log_probs: Tensor
) -> None:
    """Replaces the tokens [rows] int64 of the rows of `logits` [rows, vocabulary] with rules.

    `fields` [fields, rows or more] int64 are the words of the rows, see Field. `log_probs` [rows, LOG_PROB_WORDS]
    float64 gets the log-probability of the token, and pairs of the most likely ids with theirs, where wanted.
    """
    rows, size = logits.shape
    part_size, warps = parts_of(rows)
    parts = triton.cdiv(size, part_size)
    common = (logits, logits.stride(0), size, fields, fields.stride(0))
    options = overlap(logits.device)
    padded = {"padded": triton.next_power_of_2(parts), **options}
    by_part = {"part_size": part_size, "num_warps": warps}
    _survey[(rows, parts)](
        *common,
        work.words,
        work.biases,
        work.changed,
        work.own_peaks,
        work.own_sums,
        work.peaks,
        work.firsts,
        work.lows,
        work.counts,
        work.top_logits,
        work.top_ids,
        parts,
        # A product must not be part of a sum: the CPU rounds it.
        enable_fp_fusion=False,
        **by_part,
        **options,
    )
    ranged = (work.changed, work.peaks, work.lows, work.first_masses)
    for masses in (work.first_masses, work.masses):
        second = masses is work.masses
        _narrow[(rows, parts)](*common, *ranged, masses, parts, second=second, **by_part, **padded)
    found = (work.totals, work.listed, work.listed_weights, work.counts)
    _collect[(rows, parts)](*common, *ranged, work.masses, *found, parts, **by_part, **padded)
    _bound[(rows,)](
        *common,
        work.changed,
        work.peaks,
        *found,
        work.lowest,
        parts,
        num_warps=32,
        **padded,
    )
    _draw[(rows, parts)](
        *common,
        work.changed,
        work.lowest,
        work.sums,
        work.winners,
        parts,
        blocks=part_size // BLOCK,
        block=BLOCK,
        num_warps=warps,
        **options,
    )
    _best[(rows,)](
        *common,
        work.words,
        work.own_peaks,
        work.own_sums,
        work.peaks,
        work.firsts,
        work.top_logits,
        work.top_ids,
        work.sums,
        work.winners,
        tokens,
        log_probs,
        parts,
        **padded,
    )
