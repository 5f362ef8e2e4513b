"""`bench find` against a stack."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cli.bench.runs import HEADER
from cli.bench.runs import answer as known
from cli.commands import running_stack, trtmesh
from e2e.mesh import DEMO
from trtmesh.cli.app import app
from trtmesh.tools.bench import measuring
from trtmesh.tools.bench.find import repeated
from trtmesh.tools.bench.record import Load, Plan, Prompt, Run, RunEnd
from trtmesh.tools.bench.run_file import read_runs
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    with running_stack("--one-process", "--port", "0") as stack:
        yield stack.wait_ready()


def found(router: str, *flags: str) -> CompletedProcess[str]:
    return trtmesh(
        *("bench", "find", f"grpc://{router}", "--no-echo", "--seconds", "0.1"),
        *("--requests", "8", "--input-tokens", "4", "--output-tokens", "2"),
        *("--tokenizer", str(DEMO), "--start", "50", "--lowest", "40", "--highest", "60"),
        *flags,
    )


def test_the_highest_rate_is_found_and_its_runs_are_reported(router: str, tmp_path: Path) -> None:
    record, page = tmp_path / "runs.jsonl", tmp_path / "page.html"

    ended = found(
        *(router, "--slo", "e2e:600000", "--attainment", "0.8"),
        *("--record", str(record), "--html", str(page)),
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("60 requests/s hold with 0.8 of answers good (2 runs;")
    assert "50 requests/s: 20 of 20 good (100.00%)" in ended.stderr
    runs = read_runs(record)
    assert [run.header.load.rate for run in runs] == [50.0, 60.0]
    # The eight prompts came again, with planned times.
    assert sorted(answer.index for answer in runs[0].answers)[:4] == [0, 0, 0, 1]
    assert all(answer.planned_s <= answer.sent_s for run in runs for answer in run.answers)
    assert "poisson, 60/s" in page.read_text()


def test_interrupt_reports_the_rates_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(_setup: object, load: Load, plans: Sequence[Plan], _watch: object) -> Run:
        if load.rate != 50:
            raise asyncio.CancelledError
        answers = tuple(known(number, [0.1, 0.2]) for number in range(len(plans)))
        return Run(replace(HEADER, load=load), answers, RunEnd(1.0))

    monkeypatch.setattr(measuring, "measure", measured)
    page = tmp_path / "page.html"
    asked = ("--requests", "8", "--slo", "e2e:600000", "--html", str(page))
    rates = ("--start", "50", "--highest", "10000", "--seconds", "0.1")
    ended = CliRunner().invoke(
        app, ["bench", "find", "grpc://127.0.0.1:1", "--tokenizer", str(DEMO), *asked, *rates]
    )
    assert ended.exit_code == 130, ended.output
    assert "50 requests/s hold" in ended.stdout
    assert "it was given up" in ended.stdout
    assert "poisson, 50/s" in page.read_text()


def test_no_rate_that_holds_is_a_failure(router: str) -> None:
    ended = found(router, "--slo", "ttft:0.001", "--attainment", "0.5")

    assert ended.returncode == 1
    assert ended.stdout.startswith("no rate holds: 40 requests/s fail (2 runs;")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "--slo"),
        (("--slo", "ttft:1", "--start", "70"), "--start is 70 but must be from --lowest, 40, to"),
        (("--slo", "soon:1"), "SLO 'soon:1'"),
    ],
)
def test_what_cannot_be_searched_is_wrong_usage(flags: tuple[str, ...], why: str) -> None:
    ended = found("127.0.0.1:1", *flags)

    assert ended.returncode == 2
    assert why in ended.stderr


def test_each_lap_of_a_workload_has_sessions_of_its_own() -> None:
    plans = [Plan((Prompt(0, "a"),), session="s"), Plan((Prompt(1, "b"),))]

    laps = [*islice(repeated(plans), 5)]

    assert [plan.session for plan in laps] == ["s 0", "", "s 1", "", "s 2"]
    assert [plan.prompts[0].index for plan in laps] == [0, 1, 0, 1, 0]
