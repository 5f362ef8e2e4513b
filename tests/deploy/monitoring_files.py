"""The dashboards and alerts as they are shipped, and Prometheus' programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from conformance.binaries import Binary
from deploy.images import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
ALERTS_FILE = MONITORING / "alerts.yaml"
ALERT_TESTS_FILE = ROOT / "tests" / "deploy" / "alerts.test.yaml"

PROMETHEUS = Binary("PROMETHEUS", "prometheus")
PROMTOOL = Binary("PROMTOOL", "promtool")
"""Debian has both in its package `prometheus`."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel."""

    board: str
    panel: str
    legend: str
    expression: str
    """As it is shipped, with Grafana's variables."""

    def filled(self, choices: Mapping[str, str], interval: str) -> str:
        """The query that Grafana sends with everything chosen."""
        values = {"job": ".*", "model": ".*", "__rate_interval": interval, **choices}
        return re.sub(r"\$(\w+)", lambda variable: values[variable[1]], self.expression)


def dashboards() -> Mapping[str, Any]:
    """The dashboards by the name of their file."""
    files = sorted((MONITORING / "dashboards").glob("*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in files}


def queries() -> Iterator[Query]:
    """Every query of every panel."""
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Query(name, panel["title"], target["legendFormat"], target["expr"])


def choices() -> Mapping[str, str]:
    """The defaults of the variables with fixed values."""
    return {
        variable["name"]: variable["current"]["value"]
        for board in dashboards().values()
        for variable in board["templating"]["list"]
        if variable["type"] == "custom"
    }


def alerts() -> Sequence[Mapping[str, Any]]:
    (group,) = yaml.safe_load(ALERTS_FILE.read_text("utf-8"))["groups"]
    rules: Sequence[Mapping[str, Any]] = group["rules"]
    return rules
