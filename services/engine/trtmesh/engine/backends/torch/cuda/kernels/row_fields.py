"""The needs of the choice of a row's token, as words for kernels."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Field(IntEnum):
    """The words of a row; numbers marked with * are float64."""

    FLAGS = 0
    SLOT = 1
    """The row of `words` and `biases`."""
    PLACE = 2
    """The hash of the draw."""
    TEMPERATURE = 3
    """*"""
    TOP_K = 4
    """0 for none; below the size of the vocabulary."""
    TOP_P = 5
    """*, 1 for none."""
    DEPTH = 6
    """*, of min_p, see `filters.depth_of`."""
    REPETITION = 7
    """*"""
    PRESENCE = 8
    """*"""
    FREQUENCY = 9
    """*"""
    TOPS = 10
    """How many of the most likely tokens are wanted."""
    MASK = 11
    """The row of `masks`."""


class Flag(IntFlag):
    """The needs of a row. A row without a flag keeps its token."""

    RULED = 1
    CHANGES = 2
    """Biases, penalties, bans or a grammar."""
    DRAWS = 4
    BANS_ENDS = 8
    """Ids marked as ends are banned in this step."""
    COUNTS = 16
    """The token is counted in `words`."""
    LOG_PROBS = 32
    GUIDED = 64
    """The mask of a grammar allows tokens."""


class Word(IntFlag):
    """A word about a token of a row."""

    SEEN = 1
    BANNED = 2
    ENDS = 4


BIAS_SHIFT, COUNT_SHIFT = 3, 13
"""The index of a token's bias in `biases`, 0 for none, and the count of the token, begin at these bits."""
BIASES = 1 << (COUNT_SHIFT - BIAS_SHIFT)
MOST_COUNT = (1 << (31 - COUNT_SHIFT)) - 1

MOST_TOPS = 32
"""Most likely tokens of a row at most, a power of two."""
LOG_PROB_WORDS = 1 + 2 * MOST_TOPS
"""The log-probability of the token, then pairs of the most likely ids with theirs."""
NO_TOKEN, NOTHING_LEFT = -1, -2
"""In place of a token: the model's logits are not finite, or every token is banned."""
