"""The cheap histogram, and names in labels."""

from __future__ import annotations

from trtmesh.chassis.metrics import LONGEST_NAME, OTHER, BoundedNames, Histogram


def test_histogram_counts_equal_values_at_once() -> None:
    histogram = Histogram(bounds=(1.0, 2.0))
    histogram.observe(1.0, times=3)
    histogram.observe(1.5)
    histogram.observe(9.0)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 4), ("+Inf", 5)]
    assert histogram.sum == 13.5


def test_a_bucket_keeps_its_last_sampled_observation() -> None:
    histogram = Histogram(bounds=(1.0, 2.0))
    histogram.observe(0.5, trace_id="a" * 32)
    histogram.observe(0.75, trace_id="b" * 32)
    histogram.observe(0.9)
    (_, _, first), (_, _, second), (_, _, last) = histogram.exemplars()
    assert first is not None
    assert (first.labels, first.value) == ({"trace_id": "b" * 32}, 0.75)
    assert second is last is None


def test_names_in_labels_are_few_short_and_printable() -> None:
    names = BoundedNames(3)
    assert [names["a"], names["a"]] == ["a", "a"]
    assert names["\ud800\n\u202e"] == r"\ud800\n\u202e"
    assert len(names["x" * 10_000]) < LONGEST_NAME + 9
    assert names["late"] == OTHER
    assert names["a"] == "a"
