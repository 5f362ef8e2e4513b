"""What reports say of runs, as a user has them written."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cli.bench.runs import HEADER, answer, drawn
from cli.commands import trtmesh
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.figures import MOST_ERRORS, TOTALS, Report, report_of
from trtmesh.tools.bench.measures import MEASURES
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Disruption, Line, Load, Run, RunEnd
from trtmesh.tools.bench.report import ReportOptions
from trtmesh.tools.bench.reports.files import as_csv, as_json, run_object
from trtmesh.tools.bench.reports.tables import number
from trtmesh.tools.bench.run_file import as_line
from trtmesh.tools.bench.slo import parse_slos

HOSTILE = '<script>alert(1)</script>"\x1b[31m</svg>'


@cache
def sweep() -> tuple[Run, ...]:
    """Two concurrencies; in the second one answer fails with a hostile reason, and the server is disrupted."""
    slow = drawn(2, slower=1.5)
    broken = answer(900, (), ended_s=3.0, sent_s=1.0, outcome=AnswerOutcome.ERROR, error=HOSTILE)
    header = replace(HEADER, load=Load("closed", concurrency=16), target="grpc://=1+1:8001")
    end = RunEnd(60.0, disruptions=(Disruption("kill", "engine", 5.0, 8.0),))
    return drawn(1), Run(header, (*slow.answers, broken), end)


@cache
def report(*slos: str) -> Report:
    return report_of(sweep(), parse_slos(slos))


def recorded(path: Path, runs: Iterable[Run]) -> str:
    lines: list[Line] = []
    for run in runs:
        lines += [run.header, *run.answers, *([run.end] if run.end else [])]
    path.write_bytes(b"".join(as_line(line) for line in lines))
    return str(path)


def objects(content: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(content)["runs"]
    return found


def test_json_has_every_figure_by_aiperfs_tags() -> None:
    first, second = objects(as_json(report("ttft:100")))

    expected = {each.tag for each in MEASURES} | {each.tag for each in TOTALS}
    assert expected - first.keys() == {"lost_token_count", "doubled_token_count"}
    ttft = first["time_to_first_token"]
    assert {"unit", "avg", "min", "max", "std", "p1", "p5", "p50", "p99", "count", "sum"} <= {*ttft}
    assert ttft["unit"] == "ms"
    low, high = ttft["intervals"]["avg"]
    assert low < ttft["avg"] < high
    assert second["error_request_count"]["avg"] == 1
    assert second["error_summary"][0]["count"] == 1
    assert second["disruptions"] == [
        {"kind": "kill", "target": "engine", "at_s": 5.0, "ended_s": 8.0, "error": ""}
    ]
    assert json.loads(as_json(report()))["schema_version"] == "1.0"


def test_a_run_without_its_end_was_cancelled() -> None:
    first, second = (run_object(each) for each in report().runs)

    assert (first["was_cancelled"], second["was_cancelled"]) == (True, False)


def test_csv_has_a_row_for_each_figure() -> None:
    rows = list(csv.DictReader(as_csv(report()).decode().splitlines()))

    wanted = [each for each in rows if each["tag"] == "request_latency"]
    assert [each["load"] for each in wanted] == [
        "closed, 4 at a time",
        "closed, 16 at a time, disrupted",
    ]
    assert float(wanted[0]["avg_low"]) < float(wanted[0]["avg"]) < float(wanted[0]["avg_high"])
    (first, second) = objects(as_json(report()))
    assert float(wanted[1]["p99"]) == second["request_latency"]["p99"]
    assert float(rows[-1]["avg"]) == second["replay_sched_lag_p99"]["avg"]
    assert first


def test_a_spreadsheet_computes_nothing_of_a_name() -> None:
    (run, _) = sweep()
    header = replace(run.header, target="=cmd|' /C calc'!A0")

    rows = list(csv.reader(as_csv(report_of([replace(run, header=header)])).decode().splitlines()))

    assert {row[1] for row in rows[1:]} == {"'=cmd|' /C calc'!A0"}


def test_different_errors_are_listed_up_to_a_number() -> None:
    def failed(index: int) -> Answer:
        return answer(index, (), outcome=AnswerOutcome.ERROR, error=f"reason {index}")

    run = Run(HEADER, tuple(map(failed, range(2 * MOST_ERRORS))))

    errors = report_of([run]).runs[0].errors

    assert errors[-1] == ("others", MOST_ERRORS)
    assert sum(count for _, count in errors) == 2 * MOST_ERRORS


def test_nothing_sent_is_nothing_to_report() -> None:
    with pytest.raises(SettingsError, match="nothing was sent"):
        report_of([Run(HEADER, ())])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(SettingsError, match=r"file/own\.json cannot be written"):
        ReportOptions(json=tmp_path / "file" / "own.json").check()


def test_tables_are_printed_where_the_disk_is_full(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ReportOptions(html=Path("/dev/full"), csv=tmp_path / "own.csv")
    options.check()

    with pytest.raises(SettingsError, match="/dev/full cannot be written: No space left"):
        options.report([drawn(1)])

    assert "TTFT" in capfd.readouterr().out
    assert "time_to_first_token" in (tmp_path / "own.csv").read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (3.0, "3"), (1234.56, "1,235"), (0.123456, "0.1235"), (12.3456, "12.35")],
)
def test_numbers_have_four_digits_that_count(value: float | None, text: str) -> None:
    assert number(value) == text


def test_the_command_reports_recorded_runs_as_tables_and_files(tmp_path: Path) -> None:
    record = recorded(tmp_path / "runs.jsonl", sweep())

    ended = trtmesh(
        *("bench", "report", record, "--slo", "ttft:100 tpot:30"),
        *("--json", str(tmp_path / "own.json"), "--csv", str(tmp_path / "own.csv")),
    )

    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert "closed, 4 at a time, grpc://127.0.0.1:8001" in lines
    (ttft, *_) = (line for line in lines if line.startswith("TTFT"))
    seen = objects((tmp_path / "own.json").read_bytes())[0]["time_to_first_token"]
    assert f" {number(seen['avg'])} " in ttft
    assert f" {number(seen['p99'])} " in ttft
    # A row is a line in a pipe, and nothing moves a terminal.
    assert "\x1b" not in ended.stdout
    assert "1 x error: <script>alert(1)</script>" in ended.stdout
    # The sweep comes last.
    assert [line.split(",")[0] for line in lines[-2:]] == ["closed", "closed"]
    assert (tmp_path / "own.csv").exists()


def test_what_is_no_slo_is_wrong_usage(tmp_path: Path) -> None:
    record = recorded(tmp_path / "runs.jsonl", sweep())

    ended = trtmesh("bench", "report", record, "--slo", "fast:1")

    assert ended.returncode == 2
    assert "SLO 'fast:1' must begin with one of ttft, tpot, itl, e2e, gap" in ended.stderr


def test_compare_ends_with_1_on_a_regression(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a.jsonl", [drawn(1)])
    b = recorded(tmp_path / "b.jsonl", [drawn(2, slower=1.2)])

    worse, better = trtmesh("bench", "compare", a, b), trtmesh("bench", "compare", b, a)

    assert (worse.returncode, better.returncode) == (1, 0), worse.stderr
    assert worse.stdout.startswith(
        "closed, 4 at a time: 200 prompts in both; 0 only in A, 0 only in B; not ok: 0 in A, 0 in B;"
        " identical: 200 of 200 (100.0%)"
    )
    (row,) = (line for line in worse.stdout.splitlines() if line.startswith("TPOT           mean"))
    assert row.rstrip().endswith("regression")


def test_compare_pairs_the_loads_of_sweeps(tmp_path: Path) -> None:
    first, second = sweep()
    a = recorded(tmp_path / "a.jsonl", [first, second])
    b = recorded(tmp_path / "b.jsonl", [second])

    ended = trtmesh("bench", "compare", a, b)

    assert ended.returncode == 0
    assert ended.stdout.startswith(
        "closed, 16 at a time, disrupted: 201 prompts in both; 0 only in A, 0 only in B;"
        " not ok: 1 in A, 1 in B; identical: 200 of 200 (100.0%)"
    )
    assert "only A has a run of closed, 4 at a time" in ended.stderr


def test_compare_refuses_other_workloads(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a.jsonl", [drawn(1, 5)])
    other = replace(drawn(1, 5), header=replace(HEADER, workload="other"))
    b = recorded(tmp_path / "b.jsonl", [other])

    ended = trtmesh("bench", "compare", a, b)

    assert ended.returncode == 2
    assert "different workloads: workload is 'known answers' in A and 'other' in B" in ended.stderr
