"""Draws one token per row: the largest of logit / temperature + noise.

Noise is Gumbel's, so the largest sum is drawn with the probabilities of the softmax. It depends on (seed, batch_index,
sequence_index, position, token) alone, and not on the rest of the batch, earlier draws or the worker. So a sampled
stream is reproducible and can continue elsewhere. Rounding changes a draw only where the two largest sums nearly tie:
with logits known to an error e, about e / temperature of all draws, and at the edges of the filters (`filters.py`).

The formula, on 64-bit words with wrapping arithmetic, is SplitMix64's output function applied in a chain:

    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
             x ^= x >> 27;  x *= 0x94D049BB133111EB
             x ^= x >> 31
    place = mix(seed + G),  then for each word w of (batch_index, sequence_index, position):
    place = mix((place ^ w) + G),  with G = 0x9E3779B97F4A7C15
    exponential(x) = -ln(((x >> 12) + 0.5) * 2**-52)

    block = token / 32, rounded down
    h = mix((place ^ (2**32 + block)) + G)
    wait(token) = exponential(h) / 32, and unless token % 32 == h % 32,
                  + exponential(mix((place ^ token) + G))
    noise(token) = -ln(wait(token))

The 32 waits of a block are independent exponentials of mean 1: the shortest of 32 is an exponential of mean 1 / 32 and
equally likely to be that of any token, and the others exceed it by exponentials of mean 1 again. So one hash gives a
block's largest noise, and a block is skipped where even its highest logit with that noise would not win. A CPU thus
hashes few tokens; a device that should not be waited for hashes all, with the same result.

`mix` is a bijection, so two places with one different coordinate never share a state. Integers are exact everywhere;
logarithms may differ in their last bit between kinds of hardware, which changes one draw in some 10**14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.filters import Filters, given, temperatures

BLOCK = 32
"""Tokens of a block, a power of two."""
BLOCKS_AT_ONCE = 2**16
"""Most blocks whose tokens are all hashed at once."""

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_BLOCK_WORD = 2**32
_NO_TOKEN = 2**62
SLACK = 1e-9
"""More than any rounding of a sum."""

Words = SequenceOf[int] | NDArray[np.uint64]
W = TypeVar("W", NDArray[np.int64], Tensor)


def draw(
    sequences: SequenceOf[Continuation],
    logits: Tensor,
    peaks: Tensor,
    filters: Filters,
    *,
    looks_ahead: bool,
) -> Tensor:
    """The tokens [rows] of `logits` [rows, vocabulary]; the token of a row without a finite peak means nothing.

    `peaks` [rows] are the highest logits. For `looks_ahead` see Ordering.
    """
    configs = [sequence.token_rules.sampling for sequence in sequences]
    bounds = filters.lowest(configs, logits, peaks[:, None], [each.top_p for each in sequences])
    race = _Race(
        _blocks(logits),
        temperatures(configs, logits),
        bounds,
        given(_places_of(sequences), logits)[:, None],
    )
    return race.among_likely_blocks() if looks_ahead else race.among_all_blocks()


def _places_of(sequences: SequenceOf[Continuation]) -> NDArray[np.int64]:
    """The `place` of each sequence's next token."""
    return places(
        [sequence.token_rules.sampling.seed or 0 for sequence in sequences],
        [sequence.batch_index for sequence in sequences],
        [sequence.sequence_index for sequence in sequences],
        [len(sequence.tokens) for sequence in sequences],
    )


def places(
    seeds: Words, batch_indexes: Words, sequence_indexes: Words, positions: Words
) -> NDArray[np.int64]:
    """The `place` of each index of the equally long arguments.

    `positions` are indexes of the drawn tokens in their sequences, prompt included.
    """
    place = _mix(_words(seeds) + _GOLDEN)
    for words in (batch_indexes, sequence_indexes, positions):
        place = _hash(place, _words(words))
    return place


def _words(values: Words) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.uint64).view(np.int64)


def _hash(place: W, words: W) -> W:
    return _mix((place ^ words) + _GOLDEN)


def _mix(words: W) -> W:
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: W, bits: int) -> W:
    """Without copies of the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _exponential(words: Tensor) -> Tensor:
    return _shifted(words, 12).double().add_(0.5).mul_(2.0**-52).log_().neg_()


@dataclass(frozen=True, slots=True)
class _Race:
    """Rows in which the largest sum wins."""

    blocks: Tensor
    """Logits [rows, blocks, BLOCK]."""
    temperatures: Tensor
    """[rows, 1]"""
    lowest: Tensor
    """The lowest logits to keep, [rows, 1]."""
    places: Tensor
    """[rows, 1]"""

    def among_likely_blocks(self) -> Tensor:
        """The winners [rows]. Waits for the device."""
        hashes = self._hashes()
        waits = _exponential(hashes) / BLOCK
        firsts = self.blocks.gather(2, (hashes & (BLOCK - 1))[..., None])[..., 0]
        reached = _sums(firsts, waits, self.temperatures, self.lowest).amax(dim=1, keepdim=True)
        most = _sums(self.blocks.amax(dim=2), waits, self.temperatures, self.lowest)
        likely = (most >= reached - SLACK) & (most > -math.inf)
        rows, numbers = likely.nonzero().unbind(1)
        return self._winners(rows, numbers, hashes[rows, numbers])

    def among_all_blocks(self) -> Tensor:
        """The same without waiting."""
        rows, count = self.blocks.shape[:2]
        step = max(1, BLOCKS_AT_ONCE // count)
        if rows > step:
            parts = [self._part(slice(first, first + step)) for first in range(0, rows, step)]
            return torch.cat([part.among_all_blocks() for part in parts])
        pairs = torch.arange(rows * count, device=self.blocks.device)
        return self._winners(pairs // count, pairs % count, self._hashes().flatten())

    def _part(self, rows: slice) -> _Race:
        return _Race(
            self.blocks[rows], self.temperatures[rows], self.lowest[rows], self.places[rows]
        )

    def _hashes(self) -> Tensor:
        """[rows, blocks]"""
        numbers = torch.arange(self.blocks.shape[1], device=self.blocks.device)
        return _hash(self.places, numbers + _BLOCK_WORD)

    def _winners(self, rows: Tensor, numbers: Tensor, hashes: Tensor) -> Tensor:
        """The winners [rows] among the tokens of some blocks [blocks], known by row, number and hash."""
        within = torch.arange(BLOCK, device=rows.device)
        tokens = numbers[:, None] * BLOCK + within
        later = _exponential(_hash(self.places[rows], tokens))
        later.masked_fill_(within == (hashes & (BLOCK - 1))[:, None], 0.0)
        waits = later.add_(_exponential(hashes)[:, None] / BLOCK)
        sums = _sums(self.blocks[rows, numbers], waits, self.temperatures[rows], self.lowest[rows])
        best = sums.new_full((len(self.blocks),), -math.inf)
        best.scatter_reduce_(0, rows, sums.amax(dim=1), "amax")
        ids = tokens.masked_fill_(sums < best[rows][:, None], _NO_TOKEN).amin(dim=1)
        winners = ids.new_full((len(self.blocks),), _NO_TOKEN)
        winners.scatter_reduce_(0, rows, ids, "amin")
        # A row without a finite peak.
        return winners.masked_fill_(winners == _NO_TOKEN, 0)


def _sums(logits: Tensor, waits: Tensor, temperatures: Tensor, lowest: Tensor) -> Tensor:
    """Logits with their noise; -inf below the bound."""
    return (logits / temperatures).sub_(waits.log()).masked_fill_(logits < lowest, -math.inf)


def _blocks(logits: Tensor) -> Tensor:
    """[rows, blocks, BLOCK]"""
    missing = -logits.shape[1] % BLOCK
    if missing:
        logits = pad(logits, (0, missing), value=-math.inf)
    return logits.reshape(len(logits), -1, BLOCK)
