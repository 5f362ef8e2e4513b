"""The READMEs of the services name exactly the metrics served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.registry import Collector
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.tokenizer.metrics import TokenizerMetrics

SERVICES = Path(__file__).parents[1] / "services"
NAME = re.compile(r"`([a-z]+(?:_[a-z]+)+)(?:{[a-z,]+})?`")
"""A metric name without its common prefix."""


def of_tokenizer() -> TokenizerMetrics:
    metrics = TokenizerMetrics()
    metrics.add_lane("short")
    return metrics


@pytest.mark.parametrize(
    ("service", "metrics"), [("engine", EngineMetrics()), ("tokenizer", of_tokenizer())]
)
def test_readme_names_exactly_the_metrics_served(service: str, metrics: Collector) -> None:
    served = {
        family.name.removeprefix(f"trtmesh_{service}_") + "_total" * (family.type == "counter")
        for family in metrics.collect()
    }
    readme = (SERVICES / service / "README.md").read_text(encoding="utf-8")
    _, _, section = readme.partition("## Metrics\n")
    assert set(NAME.findall(section.partition("\n## ")[0])) == served
