"""Random numbers as a pure function of where they are used.

A draw depends on (seed, batch_index, sequence_index, position) alone, and not on the rest of the batch, earlier draws
or the worker. A sampled stream is therefore reproducible and can continue elsewhere.

The formula, on 64-bit words with wrapping arithmetic, is SplitMix64's output function applied in a chain:

    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
             x ^= x >> 27;  x *= 0x94D049BB133111EB
             x ^= x >> 31
    state = mix(seed + G),  then for each word w of (batch_index, sequence_index, position):
    state = mix((state ^ w) + G),  with G = 0x9E3779B97F4A7C15
    uniform = (state >> 11) * 2**-53

`mix` is a bijection, so two places with one different coordinate never share a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

Words = Sequence[int] | NDArray[np.uint64]


def uniforms(
    seeds: Words, batch_indexes: Words, sequence_indexes: Words, positions: Words
) -> NDArray[np.float64]:
    """Numbers in [0, 1), one per index of the equally long arguments.

    `positions` are indexes of the drawn tokens in their sequences, prompt included.
    """
    state = _mix(_words(seeds) + _GOLDEN)
    for words in (batch_indexes, sequence_indexes, positions):
        state = _mix((state ^ _words(words)) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(values: Words) -> NDArray[np.uint64]:
    return np.asarray(values, dtype=np.uint64)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
