"""The contract of metrics: names, types and labels stay, and say what they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import COUNTER, Described, Row, families
from trtmesh.chassis.metrics import described as described_by
from trtmesh.tools.metrics import SERVED

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("metric_names.txt")
ALL = [*chain.from_iterable(SERVED.values())]
OURS = [row for row in ALL if not row.name.startswith(("nv_", "vllm:", "process_"))]
"""Not those under names of others."""


def line_of(name: str, row: Described) -> str:
    return f"{name} {row.kind} {','.join(label.name for label in row.labels)}".rstrip()


def test_no_name_type_or_label_changes_unseen() -> None:
    """A renamed metric needs `former`, which keeps the old line served for a minor version."""
    served = [line_of(name, row) for row in ALL for name in (row.name, row.former) if name]
    golden = GOLDEN.read_text(encoding="utf-8").splitlines()
    lost, new = set(golden) - set(served), set(served) - set(golden)
    assert not lost, (
        f"served no longer; a rename needs `former`, a removal a new minor version: {lost}"
    )
    assert not new, f"add to {GOLDEN.name}: {new}"
    assert golden == sorted(golden)


def test_names_are_unique() -> None:
    names = Counter(name for row in ALL for name in (row.name, row.former) if name)
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("row", OURS, ids=lambda row: row.name)
def test_names_and_help_follow_the_rules(row: Described) -> None:
    """Those of Prometheus, which `promtool check metrics` knows: base units, `_total` for counters alone."""
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", row.name)
    assert row.name.endswith("_total") == (row.kind == "counter")
    words = row.name.split("_")
    assert not {"ms", "us", "s", "kb", "mb", "gb", "milliseconds", "minutes", "kilobytes"} & {
        *words
    }
    assert not {"counter", "gauge", "histogram"} & {*words}
    ends = ("_count", "_sum", "_bucket", "_info", "_created")
    assert row.name == "trtmesh_build_info" or not row.name.endswith(ends)
    if row.unit:
        assert row.unit in row.text.lower()
    assert row.text.endswith(".")
    assert row.text[:1].isupper() or row.text[:1].isdigit()


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_labels_say_their_values(row: Described) -> None:
    names = [label.name for label in row.labels]
    assert len(names) == len(set(names))
    for label in row.labels:
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", label.name)
        assert label.values
        assert label.name not in ("le", "quantile", "job", "instance")


class Renamed(Collector):
    """A process whose metric had another name in the last minor version."""

    late = 3

    def collect(self) -> Iterator[Metric]:
        yield from families("own_", ROWS, self)


ROWS: tuple[Row[Renamed], ...] = (Row(COUNTER, "late", "Late things.", former="delayed"),)


def test_a_renamed_metric_keeps_its_former_name() -> None:
    registry = CollectorRegistry()
    registry.register(Renamed())
    assert registry.get_sample_value("own_late_total") == 3
    assert registry.get_sample_value("own_delayed_total") == 3
    (row,) = described_by("own_", ROWS)
    assert (row.name, row.former) == ("own_late_total", "own_delayed_total")


def test_all_metrics_come_from_tables() -> None:
    """A family made elsewhere is in no table, on no page and under no test."""
    makers = {
        str(file.relative_to(ROOT))
        for folder in ("services", "tools")
        for file in (ROOT / folder).rglob("*.py")
        if re.search(
            r"\b(Counter|Gauge|Histogram|Summary|Info)MetricFamily\b|prometheus_client import .*\bGauge\b",
            file.read_text(encoding="utf-8"),
        )
    }
    assert makers == {"services/chassis/trtmesh/chassis/metrics.py"}
