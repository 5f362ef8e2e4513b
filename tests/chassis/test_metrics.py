"""The cheap histogram."""

from __future__ import annotations

from trtmesh.chassis.metrics import Histogram


def test_histogram_counts_equal_values_at_once() -> None:
    histogram = Histogram(bounds=(1.0, 2.0))
    histogram.observe(1.0, times=3)
    histogram.observe(1.5)
    histogram.observe(9.0)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 4), ("+Inf", 5)]
    assert histogram.sum == 13.5
