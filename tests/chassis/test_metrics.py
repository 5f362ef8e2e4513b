"""The cheap histogram."""

from __future__ import annotations

from trtmesh.chassis.metrics import Histogram


def test_histogram_counts_equal_values_at_once() -> None:
    histogram = Histogram("h", "H.", bounds=(1.0, 2.0))
    histogram.observe(1.0, times=3)
    histogram.observe(1.5)
    histogram.observe(9.0)
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in histogram.family().samples
    }
    assert samples["h_bucket", "1.0"] == 3
    assert samples["h_bucket", "2.0"] == 4
    assert samples["h_bucket", "+Inf"] == samples["h_count", None] == 5
    assert samples["h_sum", None] == 13.5
