"""Draws one token per row: the largest of logit / temperature + noise.

Noise is Gumbel's, so the largest sum is drawn with the probabilities of the softmax. The noise depends on (seed,
batch_index, sequence_index, position, token) alone, and not on the rest of the batch, earlier draws or the worker. So a
sampled stream is reproducible and can continue elsewhere. Rounding changes a draw only where the two largest sums
nearly tie: with logits known to an error e, about e / temperature of all draws, and at the edges of the filters
(`filters.py`).

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
block's largest noise, and a token is skipped where even that noise would not make it win. A CPU thus hashes few tokens;
a device that should not be waited for hashes all, with the same result.

Drafts with logits are verified with draws of their own, at mix((place ^ w) + G) in the place of `place`: w is 2**40 for

    uniform(x) = ((x >> 12) + 0.5) * 2**-52

and 2**40 + 1 for the noise of the token in the stead of a draft.

`mix` is a bijection, so two places with one different coordinate never share a state. Integers are exact everywhere;
logarithms may differ in their last bit between kinds of hardware, which changes one draw in some 10**14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache
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
"""Most blocks with all tokens hashed at once."""
STREAMS = 2**12
"""Most streams with a remembered part of the place."""
FEW_BLOCKS = 0.3
"""Up to this share of blocks with tokens to keep, blocks are hashed without a bound on the noise."""

LEAST = float(np.finfo(np.float32).min)
"""The lowest logit of a token that may win."""

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_BLOCK_WORD = 2**32
_ACCEPTANCE_WORD = 2**40
_REPLACEMENT_WORD = 2**40 + 1
_NO_TOKEN = 2**62
SLACK = 1e-9
"""More than any rounding of a sum, absolute and relative."""

Words = SequenceOf[int] | NDArray[np.uint64] | NDArray[np.int64]
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
        given(places_of(sequences), logits)[:, None],
    )
    return race.among_likely() if looks_ahead else race.among_all()


def places_of(sequences: SequenceOf[Continuation]) -> NDArray[np.int64]:
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
    coordinates = zip(seeds, batch_indexes, sequence_indexes, strict=True)
    streams = np.array([stream_of(*words) for words in coordinates], dtype=np.int64)
    return places_in(streams, positions)


def places_in(streams: NDArray[np.int64], positions: Words) -> NDArray[np.int64]:
    """The `place` of each index of `stream_of` results and positions."""
    return _hash(streams, _words(positions))


def uniform(place: NDArray[np.int64]) -> float:
    """A number in (0, 1) for a place [1], independent of the noise there."""
    word = _hash(place, _words([_ACCEPTANCE_WORD]))
    return float((_shifted(word, 12)[0] + 0.5) * 2.0**-52)


def draw_by_weights(weights: Tensor, place: NDArray[np.int64]) -> int:
    """A token by weights [vocabulary] of any sum, for a place [1], independent of the noise there."""
    apart = torch.from_numpy(_hash(place, _words([_REPLACEMENT_WORD])))[:, None]
    ones = torch.ones(1, 1, dtype=torch.float64)
    logits = _blocks(weights.log()[None])
    return int(_Race(logits, ones, torch.full_like(ones, -math.inf), apart).among_all())


@lru_cache(maxsize=STREAMS)
def stream_of(seed: int, batch_index: int, sequence_index: int) -> int:
    """The `place` without the position."""
    place = _mix(_words([seed]) + _GOLDEN)
    for word in (batch_index, sequence_index):
        place = _hash(place, _words([word]))
    return int(place[0])


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


@dataclass(frozen=True, slots=True)
class _Race:
    """Rows in which the largest sum wins, on any device."""

    blocks: Tensor
    """Logits [rows, blocks, BLOCK]."""
    temperatures: Tensor
    """[rows, 1]"""
    lowest: Tensor
    """The lowest logits to keep, [rows, 1]."""
    places: Tensor
    """[rows, 1]"""

    def among_all(self) -> Tensor:
        """The winners [rows], without waiting for the device."""
        rows, count = self.blocks.shape[:2]
        step = max(1, BLOCKS_AT_ONCE // count)
        if rows > step:
            parts = [self._part(slice(first, first + step)) for first in range(0, rows, step)]
            return torch.cat([part.among_all() for part in parts])
        tokens = torch.arange(count * BLOCK, device=self.blocks.device).view(count, BLOCK)
        best = (sums := self._sums(tokens)).amax(dim=(1, 2), keepdim=True)
        return torch.where(sums < best, _NO_TOKEN, tokens).amin(dim=(1, 2))

    def _part(self, rows: slice) -> _Race:
        return _Race(
            self.blocks[rows], self.temperatures[rows], self.lowest[rows], self.places[rows]
        )

    def _sums(self, tokens: Tensor) -> Tensor:
        """Logits with their noise; -inf below the bound."""
        places, temperatures, lowest = (
            each[..., None] for each in (self.places, self.temperatures, self.lowest)
        )
        hashes = _hash(places, tokens[:, :1] // BLOCK + _BLOCK_WORD)
        waits = _exponential(_hash(places, tokens))
        waits.masked_fill_((tokens ^ hashes) & (BLOCK - 1) == 0, 0.0)
        waits.add_(_exponential(hashes) / BLOCK)
        sums = (self.blocks / temperatures).sub_(waits.log_())
        return sums.masked_fill_(self.blocks < lowest, -math.inf)

    def among_likely(self) -> Tensor:
        """The same on a CPU: there numpy begins a small operation in less time than PyTorch."""
        maxima = self.blocks.amax(dim=2)
        fields = (self.blocks, maxima, self.temperatures, self.lowest, self.places)
        return torch.from_numpy(_LikelyTokens(*(each.numpy() for each in fields)).winners())


def _exponential(words: Tensor) -> Tensor:
    return _shifted(words, 12).double().add_(0.5).mul_(2.0**-52).log_().neg_()


@dataclass(frozen=True, slots=True)
class _LikelyTokens:
    """A race among the tokens with a chance."""

    blocks: NDArray[np.float32]
    """Logits [rows, blocks, BLOCK]."""
    maxima: NDArray[np.float32]
    """[rows, blocks]"""
    temperatures: NDArray[np.float64]
    """[rows, 1]"""
    lowest: NDArray[np.float64]
    """[rows, 1]"""
    places: NDArray[np.int64]
    """[rows, 1]"""

    def winners(self) -> NDArray[np.int64]:
        """The winners [rows]."""
        # Tokens that bans and grammars forbid have no chance, though they reach a bound of none.
        needed = np.maximum(self.lowest, LEAST).repeat(self.maxima.shape[1], axis=1)
        likely = self.maxima >= needed
        if np.count_nonzero(likely) > FEW_BLOCKS * likely.size:
            needed = self._needed()
            likely = self.maxima >= needed
        chosen = np.flatnonzero(likely)
        blocks = self.blocks.reshape(-1, BLOCK)[chosen]
        within = np.flatnonzero(blocks >= needed.ravel()[chosen][:, None])
        return self._best(chosen[within // BLOCK] * BLOCK + within % BLOCK)

    def _needed(self) -> NDArray[np.float64]:
        """Logits [rows, blocks] below which no token of a block can win."""
        numbers = np.arange(self.maxima.shape[1])
        hashes = _hash(self.places, numbers + _BLOCK_WORD)
        noise = -np.log(_exponentials(hashes) / BLOCK)
        starts = np.arange(0, self.blocks.size, BLOCK).reshape(hashes.shape)
        firsts = self.blocks.ravel()[starts + (hashes & (BLOCK - 1))]
        sums = np.where(firsts >= self.lowest, firsts / self.temperatures + noise, -math.inf)
        reached = sums.max(axis=1, keepdims=True)
        enough = reached * (1 - np.copysign(SLACK, reached)) - SLACK
        needed: NDArray[np.float64] = (enough - noise) * self.temperatures
        return np.maximum(needed, np.maximum(self.lowest, LEAST))

    def _best(self, indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The winners [rows] among the logits at ascending indexes of the flat `blocks`."""
        count, size = len(self.maxima), self.maxima.shape[1] * BLOCK
        rows, tokens = indexes // size, indexes % size
        words = np.array((tokens // BLOCK + _BLOCK_WORD, tokens))
        hashes = _hash(self.places[rows, 0], words)
        shortest, later = _exponentials(hashes)
        later[(tokens ^ hashes[0]) & (BLOCK - 1) == 0] = 0.0
        noise = -np.log(later + shortest / BLOCK)
        sums = self.blocks.ravel()[indexes] / self.temperatures[rows, 0] + noise
        best = np.full(count, -math.inf)
        np.maximum.at(best, rows, sums)
        winners = np.zeros(count, dtype=np.int64)
        # Backwards, so that the lowest of equals remains.
        won = np.flatnonzero(sums == best[rows])[::-1]
        winners[rows[won]] = tokens[won]
        return winners


def _exponentials(words: NDArray[np.int64]) -> NDArray[np.float64]:
    exponentials: NDArray[np.float64] = -np.log((_shifted(words, 12) + 0.5) * 2.0**-52)
    return exponentials


def _blocks(logits: Tensor) -> Tensor:
    """[rows, blocks, BLOCK]"""
    missing = -logits.shape[1] % BLOCK
    if missing:
        logits = pad(logits, (0, missing), value=-math.inf)
    return logits.reshape(len(logits), -1, BLOCK)
