"""Adds log-probabilities in float32, token by token.

A sum that is rounded after each token as messages carry it does not depend on how tokens are grouped into messages, and
another worker or router continues it exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import c_float
from itertools import accumulate


def next_sum(total: float, log_prob: float) -> float:
    """The sum after one more token; an infinity where it exceeds a float32."""
    return c_float(total + log_prob).value


def sums(log_probs: Iterable[float], total: float = 0.0) -> Iterator[float]:
    """The sum after each token, continued from `total`."""
    after = accumulate(log_probs, next_sum, initial=total)
    next(after)
    return after
