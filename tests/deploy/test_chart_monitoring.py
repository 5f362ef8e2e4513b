"""The chart brings the project's dashboards and rules, and queries that Prometheus understands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import promql_parser
import pytest
import yaml
from deploy.chart import CHART, DEPLOY, EXAMPLES, NAMESPACE, RELEASE, named, of_kind, render

from deploy import helm

MONITORING = DEPLOY / "monitoring"


def test_every_dashboard_is_a_config_map_that_grafana_finds() -> None:
    objects = render(EXAMPLES["monitoring"])
    files = sorted((MONITORING / "dashboards").glob("*.json"))
    assert files
    for file in files:
        one = named(objects, "ConfigMap", f"{RELEASE}-trtmesh-dashboard-{file.stem}")
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["data"].keys() == {file.name}
        assert json.loads(one["data"][file.name]) == json.loads(file.read_text("utf-8"))


def test_the_rules_are_those_of_prometheus() -> None:
    (rule,) = of_kind(render(EXAMPLES["monitoring"]), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((MONITORING / "alerts.yaml").read_text("utf-8"))
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_nothing_else_is_packed() -> None:
    packed = {Path(name) for name in helm.files(CHART)}
    suffixes = {path.suffix for path in packed if path.parts[0] == "monitoring"}
    assert suffixes == {".json", ".yaml"}
    assert not any("grafana" in path.parts or path.name == "prometheus.yml" for path in packed)


def test_a_chart_without_them_renders(tmp_path: Path) -> None:
    """Such as an archive made where links are left out."""
    bare = tmp_path / "trtmesh"
    shutil.copytree(CHART, bare, ignore=shutil.ignore_patterns("monitoring", "*.pyc"))
    shutil.copy(CHART / "templates" / "monitoring.yaml", bare / "templates" / "monitoring.yaml")
    files = helm.render(bare, EXAMPLES["monitoring"], RELEASE, NAMESPACE)
    assert "kind: ServiceMonitor" in files["trtmesh/templates/monitoring.yaml"]
    assert "kind: PrometheusRule" not in files["trtmesh/templates/monitoring.yaml"]


@pytest.mark.parametrize("example", ["autoscaling", "from-zero"])
def test_scaling_asks_what_prometheus_understands(example: str) -> None:
    scaled = of_kind(render(EXAMPLES[example]), "ScaledObject")
    queries = [each["metadata"]["query"] for one in scaled for each in one["spec"]["triggers"]]
    assert len(queries) > 3
    for query in queries:
        promql_parser.parse(query)
        # Of this release alone.
        assert query.count(f'namespace="{NAMESPACE}"') == query.count("trtmesh_")
