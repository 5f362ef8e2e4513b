"""`bench serve` with reports, against a stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.commands import running_stack, trtmesh
from e2e.mesh import DEMO
from trtmesh.tools.bench.run_file import read_runs


def test_a_sweep_is_recorded_and_reported(tmp_path: Path) -> None:
    record, page, figures = (tmp_path / name for name in ("runs.jsonl", "page.html", "own.json"))
    with running_stack("--one-process", "--port", "0") as stack:
        router = stack.wait_ready()
        metrics = f"http://127.0.0.1:{stack.child('router-0')['metrics_port']}/metrics"
        ended = trtmesh(
            *("bench", "serve", f"grpc://{router}", "--concurrency", "1,4"),
            *("--requests", "8", "--output-tokens", "5", "--no-echo", "--record", str(record)),
            *("--metrics", metrics, "--tokenizer", str(DEMO)),
            *("--html", str(page), "--json", str(figures), "--slo", "e2e:60000"),
        )

    assert ended.returncode == 0, ended.stderr
    runs = read_runs(record)
    reported = json.loads(figures.read_bytes())["runs"]
    assert [each["load"] for each in reported] == ["closed, 1 at a time", "closed, 4 at a time"]
    for run, own in zip(runs, reported, strict=True):
        waits = [each.arrivals_s[0] - each.planned_s for each in run.answers]
        assert own["time_to_first_token"]["avg"] == pytest.approx(1000 * sum(waits) / len(waits))
        assert own["good_request_count"]["avg"] == own["request_count"]["avg"] == 8
        assert (own["lost_token_count"]["avg"], own["doubled_token_count"]["avg"]) == (0, 0)
        assert run.samples[0].gauges["trtmesh_router_ready_workers"] == 1
    assert page.read_text().count("<svg") >= 3 + 3 + 2 * 4
    assert "\x1b" not in ended.stdout + ended.stderr

    again = trtmesh("bench", "compare", str(record), str(record))
    assert again.returncode == 0
    assert again.stdout.count("identical: 8 of 8") == 2
