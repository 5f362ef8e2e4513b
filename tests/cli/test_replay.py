"""`trtmesh replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from router.traces import shared_prefixes, write_trace
from trtmesh.cli.app import app
from trtmesh.router.placement import POLICIES
from typer.testing import CliRunner


def test_command_compares_policies(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "trace.jsonl", shared_prefixes(100))
    run = CliRunner().invoke(
        app, ["replay", str(file), "--policy", "round_robin", "--policy", "auto", "--json"]
    )
    assert run.exit_code == 0, run.output
    figures: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["policy"] for row in figures] == ["round_robin", "auto"]
    assert figures[0]["hit_rate"] < figures[1]["hit_rate"] <= figures[1]["best_hit_rate"]
    table = CliRunner().invoke(app, ["replay", str(file)])
    assert table.exit_code == 0
    assert all(policy in table.output for policy in POLICIES)
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "none")]).exit_code == 1


def test_command_compares_shares_of_split_items(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "trace.jsonl", shared_prefixes(100))
    shares = {}
    for split in ("always", "never", "auto"):
        flags = ("--policy", "auto", "--json", "--workers", "3", "--prefill", "1", "--split", split)
        run = CliRunner().invoke(app, ["replay", str(file), *flags])
        assert run.exit_code == 0, run.output
        shares[split] = json.loads(run.stdout)["split"]
    assert shares["never"] == 0 < shares["auto"] <= shares["always"] == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--policy", "x"),
        ("--split", "x"),
        ("--prefill", "4"),
        ("--speed", "nan"),
        ("--step-ms", "inf"),
        ("--workers", "0"),
    ],
)
def test_wrong_usage_has_status_2(tmp_path: Path, flags: tuple[str, str]) -> None:
    file = write_trace(tmp_path / "trace.jsonl", shared_prefixes(10))
    run = CliRunner().invoke(app, ["replay", str(file), *flags])
    assert run.exit_code == 2
    assert flags[0] in run.stderr
