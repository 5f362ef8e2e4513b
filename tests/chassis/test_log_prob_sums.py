"""Sums of log-probabilities are those of messages."""

from __future__ import annotations

import math
from ctypes import c_float

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.log_prob_sums import next_sum, sums
from trtmesh.v1 import generation_pb2 as pb

LOG_PROBS = st.lists(st.floats(max_value=0, width=32, allow_nan=False), max_size=20)


@given(LOG_PROBS, st.integers(0, 20))
def test_sum_is_continued_exactly_from_a_message(log_probs: list[float], cut: int) -> None:
    whole = list(sums(log_probs))
    message = pb.TokenDetails(cumulative_log_prob=[0.0, *whole][: cut + 1][-1])
    assert list(sums(log_probs[cut:], message.cumulative_log_prob)) == whole[cut:]


@given(LOG_PROBS)
def test_sums_are_of_float32(log_probs: list[float]) -> None:
    with np.errstate(over="ignore"):
        expected = np.add.accumulate(np.array(log_probs, np.float32), dtype=np.float32)
    assert list(sums(log_probs)) == expected.tolist()


@pytest.mark.parametrize("log_prob", [-math.inf, float(np.finfo(np.float32).min)])
def test_sum_beyond_float32_is_infinite(log_prob: float) -> None:
    assert next_sum(next_sum(0.0, log_prob), log_prob) == -math.inf


def test_sum_of_a_worker_is_that_of_its_messages() -> None:
    """A worker may know more digits than its messages tell: here enough to round the sum the other way."""
    first, second = -2.808119297027588, -3.562743902206421
    assert c_float(second - 1e-8).value == second
    assert next_sum(first, second - 1e-8) == next_sum(first, second)
