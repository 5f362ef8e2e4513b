"""Dashboards and alerts as files: fresh, known to Grafana and Prometheus, and about metrics that exist."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from deploy.images import ROOT
from deploy.monitoring_files import (
    ALERT_TESTS_FILE,
    MONITORING,
    PROMTOOL,
    alerts,
    choices,
    dashboards,
    queries,
)
from deploy.stack import COMPOSE_FILE
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


@pytest.fixture(scope="module")
def builder() -> dict[str, Any]:
    """The names of build.py."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(MONITORING))
        return runpy.run_path(str(MONITORING / "build.py"))


def test_files_are_as_their_tables_say(builder: dict[str, Any]) -> None:
    files: dict[Path, str] = builder["files"]()
    shipped = {*(MONITORING / "dashboards").iterdir(), MONITORING / "alerts.yaml"}
    assert shipped == files.keys()
    stale = [path.name for path, text in files.items() if path.read_text("utf-8") != text]
    assert stale == [], "run deploy/monitoring/build.py"


@pytest.mark.parametrize(
    ("expression", "legend", "stranger"),
    [
        ("rate(trtmesh_router_request_total[1m])", "", "metric trtmesh_router_request_total"),
        ("trtmesh_router_ready_workers_total", "", "metric trtmesh_router_ready_workers_total"),
        ('trtmesh_router_requests_total{result="x"}', "", "labels ['result']"),
        ("sum by (tenant) (trtmesh_router_ready_workers)", "", "labels ['tenant']"),
        ("trtmesh_router_ready_workers", "{{model}}", "labels ['model']"),
        ("scrape_duration_seconds", "", "metric scrape_duration_seconds"),
    ],
)
def test_unknown_names_fail_the_build(
    builder: dict[str, Any], expression: str, legend: str, stranger: str
) -> None:
    check: Callable[..., None] = builder["check"]
    with pytest.raises(builder["Unknown"], match=stranger.replace("[", r"\[")):
        check(expression, builder["LEGEND"].findall(legend), builder["labels_by_name"]())


def test_what_is_no_promql_fails_the_build(builder: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unclosed"):
        builder["check"]("sum(trtmesh_tasks", [], builder["labels_by_name"]())


def test_queries_parse_with_every_variable_filled_in() -> None:
    filled = [query.filled(choices(), "20s") for query in queries()]
    assert len(filled) >= 60
    for expression in filled:
        assert "$" not in expression
        promql_parser.parse(expression)


@pytest.mark.parametrize("name", dashboards())
def test_grafana_knows_every_field(name: str) -> None:
    """What its own types do not read is missing in what they write."""
    board = dashboards()[name]
    written = Dashboard.from_json(board)
    assert contains(JSONEncoder().default(written), board) == []


def contains(written: Any, given: Any, path: str = "") -> list[str]:
    """Fields of `given` that differ in `written`."""
    if hasattr(written, "to_json"):
        written = written.to_json()
    if isinstance(given, dict):
        if not isinstance(written, dict):
            return [path]
        return [
            stranger
            for key, each in given.items()
            for stranger in contains(written.get(key), each, f"{path}.{key}")
        ]
    if isinstance(given, list):
        if not isinstance(written, list) or len(written) != len(given):
            return [path]
        return [
            stranger
            for number, pair in enumerate(zip(written, given, strict=True))
            for stranger in contains(*pair, f"{path}[{number}]")
        ]
    return [] if written == given else [path]


def test_dashboards_have_names_of_their_own_and_no_ids() -> None:
    boards = dashboards()
    assert {board["uid"] for board in boards.values()} == {f"trtmesh-{name}" for name in boards}
    for name, board in boards.items():
        assert "id" not in board
        variables = {variable["name"] for variable in board["templating"]["list"]}
        assert {"datasource", "job", "model"} <= variables, name
        titles = [panel["title"] for panel in board["panels"]]
        assert all(titles)


def test_panels_do_not_overlap() -> None:
    for board in dashboards().values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (place["x"] + x, place["y"] + y)
                for x in range(place["w"])
                for y in range(place["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells


def test_every_alert_has_a_summary_and_a_runbook() -> None:
    page = (ROOT / "docs" / "operating.md").read_text("utf-8")
    headings = [line.lstrip("# ") for line in page.splitlines() if line.startswith("#")]
    anchors = {f"docs/operating.md#{each.lower().replace(' ', '-')}" for each in headings}
    for alert in alerts():
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook"] in anchors
        assert alert["labels"]["severity"] in ("page", "ticket")


def test_every_alert_is_tested_above_and_below_its_bound() -> None:
    tests = yaml.safe_load(ALERT_TESTS_FILE.read_text("utf-8"))["tests"]
    seen = [
        (rule["alertname"], bool(rule["exp_alerts"]))
        for test in tests
        for rule in test["alert_rule_test"]
    ]
    names = [alert["alert"] for alert in alerts()]
    assert sorted(seen) == sorted((name, fires) for name in names for fires in (True, False))


@PROMTOOL.needed
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(MONITORING / "alerts.yaml")),
        ("check", "config", str(MONITORING / "prometheus.yml")),
        ("test", "rules", str(ALERT_TESTS_FILE)),
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
async def test_promtool_finds_no_fault(arguments: tuple[str, ...]) -> None:
    status, output = await PROMTOOL.run(*arguments, seconds=280)
    assert (status, "SUCCESS" in output, "FAILED" in output) == (0, True, False), output


def test_the_profile_mounts_what_is_shipped() -> None:
    services = yaml.safe_load(COMPOSE_FILE.read_text("utf-8"))["services"]
    mounted = {
        source: target
        for name in ("prometheus", "grafana")
        for source, target, *_ in (volume.split(":") for volume in services[name]["volumes"])
        if source.startswith("./")
    }
    assert all((COMPOSE_FILE.parent / source).exists() for source in mounted)
    targets = {*mounted.values()}
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= targets
    (provider,) = yaml.safe_load((MONITORING / "grafana" / "dashboards.yaml").read_text("utf-8"))[
        "providers"
    ]
    assert mounted["./monitoring/dashboards"] == provider["options"]["path"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).name in [path.name for path in (MONITORING / "dashboards").iterdir()]


def test_prometheus_looks_for_every_service_of_the_mesh() -> None:
    services = yaml.safe_load(COMPOSE_FILE.read_text("utf-8"))["services"]
    mesh = {name for name, service in services.items() if "trtmesh" in service["image"]}
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
    found = [
        name
        for job in config["scrape_configs"]
        for lookup in job["dns_sd_configs"]
        for name in lookup["names"]
    ]
    assert sorted(found) == sorted(mesh)


def test_the_profile_is_reached_from_its_host_alone() -> None:
    services = yaml.safe_load(COMPOSE_FILE.read_text("utf-8"))["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
        assert services[name]["image"].rpartition(":")[2].lstrip("v")[0].isdigit()
