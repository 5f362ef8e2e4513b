"""Reports for programs: JSON, CSV, and the files that aiperf writes.

A run in JSON has a key for each of aiperf's tags with unit, avg, min, max, std and percentiles, as in aiperf's own
export 1.4; `intervals` is ours. Tags that aiperf lacks have the same form.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.figures import PERCENTS, TOTALS, Distribution
from trtmesh.tools.bench.intervals import STATISTICS, Interval
from trtmesh.tools.bench.measures import GAP, MEASURES
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Header
from trtmesh.tools.bench.reports.report import Report, RunReport

SCHEMA_VERSION = "1.0"
AIPERF_SCHEMA_VERSION = "1.4"
BILLION = 1_000_000_000


def as_json(report: Report) -> bytes:
    whole = {
        "schema_version": SCHEMA_VERSION,
        "slos_ms": {slo.name: slo.limit_ms for slo in report.slos},
        "runs": [run_object(each) for each in report.runs],
    }
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2) + b"\n"


def run_object(report: RunReport) -> dict[str, Any]:
    """A run as JSON, metadata first."""
    header, end = report.run.header, report.run.end
    started = datetime.fromtimestamp(header.started_unix_s, UTC)
    return {
        "load": str(header.load),
        "header": {name: value for name, value in asdict(header).items() if name != "schema"},
        "start_time": started.isoformat(),
        "was_cancelled": end is None or end.interrupted,
        "unsent": end.unsent if end else None,
        "disruptions": [asdict(each) for each in end.disruptions] if end else [],
        "error_summary": [
            {"error_details": {"message": text}, "count": count} for text, count in report.errors
        ],
        **dict(metrics(report)),
    }


def metrics(report: RunReport) -> Iterator[tuple[str, dict[str, Any]]]:
    """By tag, the ones without a value left out."""
    for measure in MEASURES:
        if seen := report.figures.distributions.get(measure.tag):
            yield measure.tag, _distribution(measure.unit, seen, report.intervals[measure.tag])
    for total in TOTALS:
        if (value := total.of(report.figures)) is not None:
            yield total.tag, {"unit": total.unit, "avg": value}


def _distribution(
    unit: str, seen: Distribution, intervals: Mapping[str, Interval]
) -> dict[str, Any]:
    return {
        "unit": unit,
        "avg": seen.avg,
        **{f"p{percent}": value for percent, value in seen.percentiles.items()},
        "min": seen.min,
        "max": seen.max,
        "std": seen.std,
        "count": seen.count,
        "sum": seen.sum,
        "intervals": {name: [own.low, own.high] for name, own in intervals.items()},
    }


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


def write(path: Path, content: bytes) -> None:
    """Raises SettingsError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


def write_aiperf(folder: Path, report: Report) -> None:
    """A folder for each run, with the names that aiperf's plots look for."""
    for number, run in enumerate(report.runs):
        own = folder / f"{number:02d}-{re.sub('[^a-z0-9.]+', '-', run.load.lower()).strip('-')}"
        export = {"schema_version": AIPERF_SCHEMA_VERSION, **run_object(run)}
        write(own / "profile_export_aiperf.json", orjson.dumps(export) + b"\n")
        write(own / "profile_export.jsonl", b"".join(_records(run)))


def _records(report: RunReport) -> Iterator[bytes]:
    header = report.run.header
    for answer in report.run.answers:
        yield orjson.dumps(_record(header, answer)) + b"\n"


def _record(header: Header, answer: Answer) -> dict[str, Any]:
    def ns(seconds: float) -> int:
        return int((header.started_unix_s + seconds) * BILLION)

    metadata = {
        "session_num": answer.index,
        "x_request_id": answer.request_id,
        "x_correlation_id": answer.session or answer.request_id,
        "turn_index": answer.turn,
        "credit_issued_ns": ns(answer.planned_s),
        "request_start_ns": ns(answer.sent_s),
        "request_end_ns": ns(answer.ended_s),
        "worker_id": answer.worker or header.target,
        "record_processor_id": "trtmesh",
        "benchmark_phase": "profiling",
        "was_cancelled": answer.outcome is AnswerOutcome.CANCELLED,
    }
    error = {"type": str(answer.outcome), "message": answer.error or str(answer.outcome)}
    values = {measure: measure.of(answer) for measure in MEASURES} if answer.ok else {}
    return {
        "metadata": metadata,
        "metrics": {
            measure.tag: {"value": [*own] if measure is GAP else own[0], "unit": measure.unit}
            for measure, own in values.items()
            if own
        },
        "error": None if answer.ok else error,
    }
