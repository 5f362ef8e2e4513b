"""Reports for programs: JSON and CSV.

A run in JSON has a key for each of aiperf's tags with unit, avg, min, max, std and percentiles, as in aiperf's own
export 1.4; `intervals` is ours. Tags that aiperf lacks have the same form.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import orjson
from trtmesh.tools.bench.figures import TOTALS, Figures, Report
from trtmesh.tools.bench.intervals import STATISTICS
from trtmesh.tools.bench.measures import MEASURES
from trtmesh.tools.bench.pools import PERCENTS

SCHEMA_VERSION = "1.0"


def as_json(report: Report) -> bytes:
    whole = {
        "schema_version": SCHEMA_VERSION,
        "slos_ms": {slo.name: slo.limit_ms for slo in report.slos},
        "runs": [run_object(each) for each in report.runs],
    }
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2) + b"\n"


def run_object(figures: Figures) -> dict[str, Any]:
    """A run as JSON, metadata first."""
    header, end = figures.run.header, figures.run.end
    started = datetime.fromtimestamp(header.started_unix_s, UTC)
    return {
        "load": str(header.load),
        "header": {name: value for name, value in asdict(header).items() if name != "schema"},
        "start_time": started.isoformat(),
        "was_cancelled": end is None or end.interrupted,
        "unsent": end.unsent if end else None,
        "disruptions": [asdict(each) for each in end.disruptions] if end else [],
        "error_summary": [
            {"error_details": {"message": text}, "count": count} for text, count in figures.errors
        ],
        **dict(metrics(figures)),
    }


def metrics(figures: Figures) -> Iterator[tuple[str, dict[str, Any]]]:
    """By tag, the ones without a value left out."""
    for measure in MEASURES:
        if seen := figures.distributions.get(measure.tag):
            own = asdict(seen)
            percentiles = {
                f"p{percent}": value for percent, value in own.pop("percentiles").items()
            }
            intervals = {
                name: [each.low, each.high] for name, each in figures.intervals[measure.tag].items()
            }
            yield measure.tag, {"unit": measure.unit, **own, **percentiles, "intervals": intervals}
    for total in TOTALS:
        if (value := total.of(figures)) is not None:
            yield total.tag, {"unit": total.unit, "avg": value}


def as_csv(report: Report) -> bytes:
    """A row for each figure of each run."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    percents = [f"p{percent}" for percent in PERCENTS]
    names = ("avg", "min", "max", "std", *percents, "count")
    bounds = [f"{name}_{end}" for name in STATISTICS for end in ("low", "high")]
    rows.writerow(("load", "target", "tag", "unit", *names, *bounds))
    for run in report.runs:
        for tag, own in metrics(run):
            within = own.get("intervals", {})
            ends = [within.get(name, ("", ""))[end] for name in STATISTICS for end in (0, 1)]
            values = [own.get(name, "") for name in names]
            rows.writerow(
                (run.load, _no_formula(run.run.header.target), tag, own["unit"], *values, *ends)
            )
    return text.getvalue().encode()


def _no_formula(text: str) -> str:
    """Spreadsheets compute what begins like this."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text
