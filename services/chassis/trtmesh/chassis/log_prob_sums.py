"""Adds log-probabilities in float32, token by token.

Rounding each token and each sum, as in messages, makes the sum independent of the grouping of tokens into messages. So
another worker or router continues the sum exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import c_float
from itertools import accumulate


def next_sum(total: float, log_prob: float) -> float:
    """Returns the sum after another token: infinite beyond float32."""
    return c_float(total + c_float(log_prob).value).value


def sums(log_probs: Iterable[float], total: float = 0.0) -> Iterator[float]:
    """The sum after each token, continued from `total`."""
    after = accumulate(log_probs, next_sum, initial=total)
    next(after)
    return after
