"""The choice of tokens for rows with rules: biases, penalties, bans, grammars, filters and log-probabilities.

A row has a column of words, see `row_fields.Field`. Programs of a row without rules return at once.

1. `_survey` applies biases, penalties, bans and masks, and finds the highest logits.
2. `_choose` draws as `gumbel_choice.py` does.

The lowest kept logit of top_p, as `sampling/filters.py` defines it, is not searched for: a drawn token is kept where
the tokens above have less than `top_p` of all weight. Else all from there down are filtered, and the draw is repeated
among those above. Weights are added up in float32, and as the rule's integers where that does not decide. The k-th
highest logit is searched for among the few tokens from the k-th highest block on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import (
    NO_LOGIT,
    PART,
    ROW_WARPS,
    RowLogits,
    blocks_of,
    key_of,
    values_of,
    winner_of,
)
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

LISTED = 2048
"""Most listed tokens of a row, to find the k-th highest logit."""
AT_ONCE = 8192
"""Tokens of a row read at once."""
BLOCKS_AT_ONCE = 128
"""Blocks of listed tokens read at once."""

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
_MASK = tl.constexpr(int(Field.MASK))
_CHANGES = tl.constexpr(int(Flag.CHANGES))
_DRAWS = tl.constexpr(int(Flag.DRAWS))
_BANS_ENDS = tl.constexpr(int(Flag.BANS_ENDS))
_COUNTS = tl.constexpr(int(Flag.COUNTS))
_LOG_PROBS = tl.constexpr(int(Flag.LOG_PROBS))
_GUIDED = tl.constexpr(int(Flag.GUIDED))
_BIAS_SHIFT = tl.constexpr(BIAS_SHIFT)
_COUNT_SHIFT = tl.constexpr(COUNT_SHIFT)
_ONE_MORE = tl.constexpr(1 << COUNT_SHIFT)
_BIASES = tl.constexpr(BIASES)
_LISTED = tl.constexpr(LISTED)
_AT_ONCE = tl.constexpr(AT_ONCE)
_BLOCKS_AT_ONCE = tl.constexpr(BLOCKS_AT_ONCE)
_MOST_TOPS = tl.constexpr(MOST_TOPS)
_BLOCK = tl.constexpr(BLOCK)
_FIRST_KEY = tl.constexpr(NO_LOGIT + 1)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _word(fields, stride, row, field: tl.constexpr):
    return tl.load(fields + field * stride + row)


@triton.jit
def _number(fields, stride, row, field: tl.constexpr):
    return tl.load(fields + field * stride + row).to(tl.float64, bitcast=True)


@triton.jit
def _weights(x, peak, temperature):
    """Multiples of 2**-40."""
    factor = tl.minimum(1 / temperature, 1.7976931348623157e308)
    distance = (x.to(tl.float64) - peak.to(tl.float64)) * factor
    return (tl.exp(distance) * 1099511627776.0).to(tl.int64)


@triton.jit
def _rounded_weights(x, peak, temperature):
    factor = _LOG2_E / temperature.to(tl.float32)
    # Finite, and not 0: no product of a difference is undefined.
    factor = tl.minimum(tl.maximum(factor, 1e-30), 1e30)
    return tl.exp2((x - tl.maximum(peak, -3.0e38)) * factor)


@triton.jit
def _survey(
    logits,
    row_stride,
    size,
    fields,
    stride,
    words,
    biases,
    masks,
    mask_words,
    changed,
    own_peaks,
    own_sums,
    peaks,
    firsts,
    masses,
    maxima,
    top_logits,
    top_ids,
    parts,
    blocks,
    part_size: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (row, part). Changed logits; the highest with the lowest token, those of blocks, and the sum of weights
    over that of the highest; of the model's own logits, the highest, the sum of exp, and the most likely tokens."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    flags = _word(fields, stride, row, _FLAGS)
    # Together with the flags, so as to wait for memory once.
    temperature = _number(fields, stride, row, _TEMPERATURE)
    share = _number(fields, stride, row, _TOP_P)
    top_k = _word(fields, stride, row, _TOP_K)
    if flags == 0:
        return
    at = row * parts + part
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
        if (flags & _GUIDED) != 0:
            mask = masks + _word(fields, stride, row, _MASK) * mask_words
            bits = tl.load(mask + ids // 32, mask=there, other=0)
            x = tl.where(((bits >> (ids % 32)) & 1) != 0, x, float("-inf"))
        tl.store(changed + row * size + ids, x, mask=there)
        top = tl.max(x, 0)
    tl.store(peaks + at, top)
    tl.store(firsts + at, tl.min(tl.where(x == top, ids, size), 0))
    if (flags & _DRAWS) != 0:
        part_blocks: tl.constexpr = part_size // _BLOCK
        numbers = part * part_blocks + tl.arange(0, part_blocks)
        highest = tl.max(tl.reshape(x, (part_blocks, _BLOCK)), 1)
        tl.store(maxima + row * blocks + numbers, highest, mask=numbers < blocks)
        if (share < 1) & (top_k == 0):
            tl.store(masses + at, tl.sum(_rounded_weights(x, top, temperature), 0))


@triton.jit
def _list_highest(source, highest, top_k, end, listed, kept, padded: tl.constexpr):
    """Lists tokens in `kept`, all from some logit on, at least `top_k` if there are; returns how many there are, and
    at most LISTED of them are listed. `highest` are the logits of blocks, all below the key `end`."""
    keys = key_of(highest)
    count = tl.sum((keys >= _FIRST_KEY).to(tl.int32))
    low = tl.min(tl.where(keys >= _FIRST_KEY, keys, 2147483647)).to(tl.int64)
    low = tl.where(count < top_k, _FIRST_KEY, low)
    while (count > tl.maximum(2 * top_k, _BLOCKS_AT_ONCE)) & (end - low > 1):
        middle = (low + end) >> 1
        above = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        if above >= top_k:
            low = middle
            count = above
        else:
            end = middle
    likely = keys >= low.to(tl.int32)
    places = tl.cumsum(likely.to(tl.int32), 0) - 1
    tl.store(listed + places, tl.arange(0, padded), mask=likely)
    tl.debug_barrier()
    found = tl.zeros((), tl.int32)
    for first in range(0, count, _BLOCKS_AT_ONCE):
        i = first + tl.arange(0, _BLOCKS_AT_ONCE)[:, None]
        there = i < count
        ids = tl.load(listed + i, mask=there, other=0) * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        there = there & (ids < source.size)
        x = values_of(source, ids, there)
        x = tl.reshape(x, (_BLOCKS_AT_ONCE * _BLOCK,))
        inside = key_of(x) >= low.to(tl.int32)
        slots = found + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(kept + slots, x, mask=inside & (slots < _LISTED))
        found += tl.sum(inside.to(tl.int32))
    tl.debug_barrier()
    return found


@triton.jit
def _counts(keys, middle):
    """The number of keys from `middle` on, the lowest such key, and the highest key below."""
    above = keys >= middle
    up = tl.min(tl.where(above, keys, 2147483647))
    return tl.sum(above.to(tl.int32)), up, tl.max(tl.where(above, -2147483647, keys))


@triton.jit
def _counts_of_row(source, middle, at_once: tl.constexpr):
    count = tl.zeros((), tl.int32)
    up = tl.zeros((), tl.int32) + 2147483647
    down = tl.zeros((), tl.int32) - 2147483647
    for first in range(0, source.size, at_once):
        ids = first + tl.arange(0, at_once)
        x = values_of(source, ids, ids < source.size)
        more, lowest, highest = _counts(key_of(x), middle)
        count += more
        up = tl.minimum(up, lowest)
        down = tl.maximum(down, highest)
    return count, up, down


@triton.jit
def _kth(source, keys, is_listed, top_k, end, at_once: tl.constexpr):
    """The k-th highest key below `end` of the listed ones or, unless `is_listed`, of the row; the first of all without
    so many."""
    low = tl.zeros((), tl.int64) + _FIRST_KEY
    middle = low
    while end - low > 1:
        if is_listed:
            count, up, down = _counts(keys, middle.to(tl.int32))
        else:
            count, up, down = _counts_of_row(source, middle.to(tl.int32), at_once)
        if count >= top_k:
            low = tl.minimum(up.to(tl.int64), end - 1)
        elif middle == low:
            end = low + 1
        else:
            end = tl.maximum(down.to(tl.int64) + 1, low + 1)
        middle = (low + end) >> 1
    return low.to(tl.int32)


@triton.jit
def _rounded_mass(source, peak, temperature, bound, at_once: tl.constexpr):
    """The weight of the tokens above a logit, rounded."""
    mass = tl.zeros([at_once], tl.float32)
    ids = tl.arange(0, at_once)
    x = values_of(source, ids, ids < source.size)
    for _ in range(0, source.size, at_once):
        # The next tokens arrive meanwhile.
        ids += at_once
        rest = values_of(source, ids, ids < source.size)
        mass += tl.where(x > bound, _rounded_weights(x, peak, temperature), 0.0)
        x = rest
    return tl.sum(mass)


@triton.jit
def _masses(source, peak, temperature, least, key, at_once: tl.constexpr):
    """The weights of the tokens with keys from `least` on, and of tokens with keys above `key`."""
    total = tl.zeros((), tl.int64)
    above = tl.zeros((), tl.int64)
    for first in range(0, source.size, at_once):
        ids = first + tl.arange(0, at_once)
        x = values_of(source, ids, ids < source.size)
        keys = key_of(x)
        weights = tl.where(keys >= least, _weights(x, peak, temperature), 0)
        total += tl.sum(weights)
        above += tl.sum(tl.where(keys > key, weights, 0))
    return total, above


@triton.jit
def _draw(source, fields, stride, peak, mass, maxima, listed, kept, blocks, padded: tl.constexpr):
    """The token of a row with the finite highest logit `peak`. `mass` are all weights, rounded, where top_p is the only
    filter of weights."""
    temperature = _number(fields, stride, source.row, _TEMPERATURE)
    top_k = _word(fields, stride, source.row, _TOP_K).to(tl.int32)
    share = _number(fields, stride, source.row, _TOP_P)
    place = _word(fields, stride, source.row, _PLACE).to(tl.uint64, bitcast=True)
    highest, noise, own = blocks_of(source, maxima, blocks, place, padded)
    keys = tl.full([_LISTED], _FIRST_KEY - 1, tl.int32)
    weights = tl.zeros([_LISTED], tl.int64)
    least = tl.zeros((), tl.int32) + _FIRST_KEY
    is_listed = top_k < 0
    if top_k > 0:
        end = key_of(peak).to(tl.int64) + 1
        count = _list_highest(source, highest, top_k, end, listed, kept, padded)
        is_listed = count <= _LISTED
        i = tl.arange(0, _LISTED)
        x = tl.load(kept + i, mask=(i < count) & is_listed, other=float("-inf"))
        keys = key_of(x)
        least = _kth(source, keys, is_listed, top_k, end, _AT_ONCE)
        if share < 1:
            weights = tl.where(keys >= least, _weights(x, peak, temperature), 0)
    within_top_k = least
    depth = _number(fields, stride, source.row, _DEPTH) + peak.to(tl.float64)
    bound = depth.to(tl.float32)
    least = tl.maximum(least, key_of(bound) + (bound.to(tl.float64) < depth).to(tl.int32))
    token = tl.zeros((), tl.int32)
    is_filtered = tl.full((), 1, tl.int1)
    while is_filtered:
        token = winner_of(
            source, highest, noise, own, peak, least, place, temperature, listed, padded
        )
        is_filtered = tl.full((), 0, tl.int1)
        if share < 1:
            logit = values_of(source, token, token < source.size)
            key = key_of(logit)
            if (key >= least) & (key < key_of(peak)):
                is_exact = top_k > 0
                if is_listed:
                    above = tl.sum(tl.where(keys > key, weights, 0))
                    needed = share * tl.sum(weights).to(tl.float64)
                    is_filtered = above.to(tl.float64) >= needed
                elif top_k == 0:
                    rounded = _rounded_mass(source, peak, temperature, logit, _AT_ONCE)
                    rest = rounded - share.to(tl.float32) * mass
                    is_filtered = rest >= 0
                    is_exact = tl.abs(rest) <= 1e-5 * mass
                if is_exact & (is_listed == 0):
                    total, above = _masses(source, peak, temperature, within_top_k, key, _AT_ONCE)
                    is_filtered = above.to(tl.float64) >= share * total.to(tl.float64)
                least = tl.where(is_filtered, key + 1, least)
    return token


@triton.jit
def _choose(
    logits,
    row_stride,
    size,
    fields,
    stride,
    words,
    changed,
    own_peaks,
    own_sums,
    peaks,
    firsts,
    masses,
    maxima,
    top_logits,
    top_ids,
    listed,
    kept,
    tokens,
    log_probs,
    parts,
    blocks,
    padded_parts: tl.constexpr,
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
    i = tl.arange(0, padded_parts)
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
    finite = (top > float("-inf")) & (top < float("inf"))
    own_finite = (own_top > float("-inf")) & (own_top < float("inf")) & (broken == 0)
    if finite & own_finite & ((flags & _DRAWS) != 0):
        temperature = _number(fields, stride, row, _TEMPERATURE)
        part_masses = tl.load(masses + at, mask=there, other=0.0)
        mass = tl.sum(tl.where(there, part_masses * _rounded_weights(peak, top, temperature), 0.0))
        source = RowLogits(logits, changed, (flags & _CHANGES) != 0, row, row_stride, size)
        token = _draw(
            source, fields, stride, top, mass, maxima, listed + row * blocks, kept + row * _LISTED,
            blocks, padded,
        )  # fmt: skip
    token = tl.where(finite, token, -2)
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
    """Memory of the choice: per slot, facts about tokens; per row, messages between kernels. Steps in the same stream
    share the memory."""

    def __init__(self, slots: int, rows: int, vocabulary: int, device: torch.device) -> None:
        parts, blocks = triton.cdiv(vocabulary, PART), triton.cdiv(vocabulary, BLOCK)

        def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.words = memory(slots, vocabulary, dtype=torch.int32)
        """Facts about each token, see Word."""
        self.biases = memory(slots, BIASES)
        """From index 1 on."""
        self.masks = memory(rows, triton.cdiv(vocabulary, 64), dtype=torch.int64)
        """Bits of the tokens allowed by grammars, from the lowest bit of a word on."""
        self.changed = memory(rows, vocabulary)
        self.own_peaks, self.own_sums, self.peaks, self.masses = memory(4, rows * parts).unbind()
        self.firsts = memory(rows * parts, dtype=torch.int32)
        self.maxima = memory(rows * blocks)
        self.top_logits = memory(rows * parts * MOST_TOPS)
        self.top_ids = memory(rows * parts * MOST_TOPS, dtype=torch.int32)
        self.listed = memory(rows * blocks, dtype=torch.int32)
        self.kept = memory(rows * LISTED)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values())


def choose_by_rules(
    logits: Tensor, fields: Tensor, work: Workspace, tokens: Tensor, log_probs: Tensor
) -> None:
    """Replaces the tokens [rows] int64 of the rows of `logits` [rows, vocabulary] with rules.

    `fields` [fields, rows or more] int64 are the words of the rows, see Field. `log_probs` [rows, LOG_PROB_WORDS]
    float64 gets the log-probability of the token, and pairs of the most likely ids with theirs, where wanted.
    """
    rows, size = logits.shape
    parts, blocks = triton.cdiv(size, PART), triton.cdiv(size, BLOCK)
    common = (logits, logits.stride(0), size, fields, fields.stride(0), work.words)
    found = (work.own_peaks, work.own_sums, work.peaks, work.firsts, work.masses, work.maxima)
    options = overlap(logits.device)
    _survey[(rows, parts)](
        *common,
        work.biases,
        work.masks.view(torch.int32),
        2 * work.masks.shape[1],
        work.changed,
        *found,
        work.top_logits,
        work.top_ids,
        parts,
        blocks,
        part_size=PART,
        # With fewer warps, a thread takes so many registers that few programs run at once.
        num_warps=8,
        # A product must not be fused with a sum: the CPU rounds the product.
        enable_fp_fusion=False,
        **options,
    )
    _choose[(rows,)](
        *common,
        work.changed,
        *found,
        work.top_logits,
        work.top_ids,
        work.listed,
        work.kept,
        tokens,
        log_probs,
        parts,
        blocks,
        padded_parts=triton.next_power_of_2(parts),
        padded=triton.next_power_of_2(blocks),
        num_warps=ROW_WARPS,
        **options,
    )
