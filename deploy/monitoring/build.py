"""Writes dashboards/*.json and alerts.yaml from panels.py and alerts.py, and checks them against the services' metrics.

python deploy/monitoring/build.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from alerts import ALERTS, Alert
from panels import DASHBOARDS, Choice, Dashboard, Panel
from trtmesh.tools.metrics import SERVED

HERE = Path(__file__).parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 3, 7
WIDTH = 24 // COLUMNS

METRIC = re.compile(r"\b((?:trtmesh|process|gen_ai_server)_\w+)(?:\{([^}]*)\})?")
MODELS = ("model", "gen_ai_request_model")
VARIABLES = re.compile(r"\$\w+")
LEGEND = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")

SCRAPED = frozenset({"job", "instance"})
"""Labels that Prometheus adds."""


Known = Mapping[str, frozenset[str]]
"""The labels of each series that services export, by its name."""


class Unknown(Exception):
    """A query names a metric or label that no service exports."""


def selected(expression: str, known: Known) -> str:
    """An expression of a panel with the matchers of the dashboard's variables."""

    def of(metric: re.Match[str]) -> str:
        name, given = metric.groups()
        matchers = [given] if given else []
        matchers.append('job=~"$job"')
        matchers += [f'{label}=~"$model"' for label in MODELS if label in known.get(name, ())]
        return f"{name}{{{','.join(matchers)}}}"

    return METRIC.sub(of, expression).replace("$i]", "$__rate_interval]")


def check(expression: str, legends: Sequence[str], known: Known) -> None:
    """Raises Unknown for names that no service exports, and ValueError for what PromQL does not parse."""
    exported: set[str] = set(SCRAPED)
    asked: set[str] = set(legends)

    def look(part: promql.Expr) -> None:
        if isinstance(part, promql.VectorSelector):
            name = part.name or ""
            if name not in known:
                raise Unknown(f"metric {name} in {expression}")
            exported.update(known[name])
            matched = {each.name for each in part.matchers.matchers}
            if strangers := matched - known[name] - SCRAPED:
                raise Unknown(f"labels {sorted(strangers)} of {name} in {expression}")
        elif isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            asked.update(part.modifier.labels)

    try:
        parsed = promql.parse(filled(expression))
    except ValueError as error:
        raise ValueError(f"{error}: {expression}") from None
    promql.walk(parsed, look)
    if asked - exported:
        raise Unknown(f"labels {sorted(asked - exported)} in {expression}")


def filled(expression: str) -> str:
    """An expression with values for its variables, as Grafana fills them in."""
    return VARIABLES.sub("1m", expression.replace("$objective", "0.99"))


def target(number: int, legend: str, expression: str) -> Mapping[str, Any]:
    return {
        "refId": chr(ord("A") + number),
        "expr": expression,
        "legendFormat": legend,
    }


def graph(panel: Panel, place: Mapping[str, int], known: Known) -> dict[str, Any]:
    """A panel as Grafana has it."""
    queries = {legend: selected(each, known) for legend, each in panel.queries.items()}
    for legend, expression in queries.items():
        check(expression, LEGEND.findall(legend), known)
    drawn = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": drawn}
    if panel.bound is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.bound}]
        drawn["thresholdsStyle"] = {"mode": "line"}
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.unit != "s":
        defaults["min"] = 0
    return {
        "type": "timeseries",
        "title": panel.title,
        **({"description": panel.note} if panel.note else {}),
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [target(number, *query) for number, query in enumerate(queries.items())],
    }


def laid_out(dashboard: Dashboard, known: Known) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard, below the heads of their rows."""
    below = 0
    for title, panels in dashboard.rows.items():
        yield {
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": below, "w": 24, "h": 1},
            "panels": [],
        }
        below += 1
        for number, panel in enumerate(panels):
            line, column = divmod(number, COLUMNS)
            place = {"x": column * WIDTH, "y": below + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield graph(panel, place, known)
        below += -(-len(panels) // COLUMNS) * HEIGHT


def fixed(choice: Choice) -> dict[str, Any]:
    """A variable with values of ours."""
    options = [
        {"text": each, "value": each, "selected": each == choice.values[0]}
        for each in choice.values
    ]
    return {
        "type": "custom",
        "name": choice.name,
        "label": choice.title,
        "query": ",".join(choice.values),
        "options": options,
        "current": options[0],
    }


def found(name: str, metric: str, label: str) -> dict[str, Any]:
    """A variable with the values of a label; all of them by default."""
    return {
        "type": "query",
        "name": name,
        "label": name.capitalize(),
        "datasource": DATASOURCE,
        "query": {"qryType": 1, "query": f"label_values({metric}, {label})", "refId": "variable"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def board(dashboard: Dashboard, known: Known) -> dict[str, Any]:
    """A dashboard as Grafana has it, without an id, which each Grafana gives itself."""
    return {
        "uid": f"trtmesh-{dashboard.name}",
        "title": f"trtmesh: {dashboard.title}",
        "tags": ["trtmesh"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "trtmesh",
                "tags": ["trtmesh"],
                "asDropdown": False,
                "keepTime": True,
                "includeVars": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Data source",
                    "query": "prometheus",
                    "current": {},
                    "refresh": 1,
                },
                found("job", "trtmesh_build_info", "job"),
                found("model", "trtmesh_router_requests_total", "model"),
                *map(fixed, dashboard.choices),
            ]
        },
        "panels": [
            {"id": number, **panel} for number, panel in enumerate(laid_out(dashboard, known), 1)
        ],
    }


def rule(alert: Alert, known: Known) -> dict[str, Any]:
    """An alert as Prometheus has it."""
    check(alert.expression, LEGEND.findall(alert.summary), known)
    anchor = alert.runbook.lower().replace(" ", "-")
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook": f"docs/operating.md#{anchor}"},
    }


def labels_by_name() -> Known:
    """What the tables of the services say, and what Prometheus says of each scrape."""
    known: dict[str, frozenset[str]] = {"up": frozenset()}
    for metric in chain.from_iterable(SERVED.values()):
        labels = frozenset(label.name for label in metric.labels)
        if metric.kind == "histogram":
            known |= {f"{metric.name}_bucket": labels | {"le"}}
            known |= dict.fromkeys((f"{metric.name}_count", f"{metric.name}_sum"), labels)
        else:
            known[metric.name] = labels
    return known


def files() -> Mapping[Path, str]:
    """All that is built, by file."""
    known = labels_by_name()
    made = {
        HERE / "dashboards" / f"{each.name}.json": json.dumps(board(each, known), indent=1) + "\n"
        for each in DASHBOARDS
    }
    rules = {"groups": [{"name": "trtmesh", "rules": [rule(each, known) for each in ALERTS]}]}
    head = "# Written by build.py from alerts.py.\n"
    made[HERE / "alerts.yaml"] = head + yaml.safe_dump(rules, sort_keys=False, width=1000)
    return made


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
