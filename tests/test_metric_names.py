"""The READMEs of the services name exactly the metrics served."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.tokenizer.metrics import TokenizerMetrics

SERVICES = Path(__file__).parents[1] / "services"
NAME = re.compile(r"`([a-z]+(?:_[a-z]+)+)(?:{[a-z,]+})?`")
"""A metric name without its common prefix."""


def of_engine(registry: CollectorRegistry) -> None:
    registry.register(EngineMetrics())


@pytest.mark.parametrize(
    ("service", "register"), [("engine", of_engine), ("tokenizer", TokenizerMetrics)]
)
def test_readme_names_exactly_the_metrics_served(
    service: str, register: Callable[[CollectorRegistry], object]
) -> None:
    registry = CollectorRegistry()
    register(registry)
    served = {
        family.name.removeprefix(f"trtmesh_{service}_") + "_total" * (family.type == "counter")
        for family in registry.collect()
    }
    readme = (SERVICES / service / "README.md").read_text(encoding="utf-8")
    _, _, section = readme.partition("## Metrics\n")
    assert set(NAME.findall(section.partition("\n## ")[0])) == served
