"""A build killed at each of its changes of a file, while it replaces the results of an older plan."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from cli.engine_build.building import Workshop, plan_of

TESTS = Path(__file__).parents[2]


def plan(revision: str) -> dict[str, Any]:
    precision = {"weights": "fp8", "kv_cache": "fp8"}
    return plan_of(
        model={"revision": revision, "config": "tiny.json", "precisions": precision, "tensor": 1}
    )


def by_directory(results: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The published files by directory."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, content in results.items():
        if not any(part.startswith((".partial", ".replaced")) for part in Path(name).parts):
            found[str(Path(name).parent)][Path(name).name] = content
    return found


@pytest.mark.timeout(1800)  # It runs more than sixty builds, one after another.
def test_no_kill_leaves_half_a_result_and_each_is_made_up_for(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path).write(plan("new"))
    assert workshop.run().returncode == 0
    new = workshop.results()
    shutil.rmtree(workshop.out)
    workshop.write(plan("old"))
    assert workshop.run().returncode == 0
    old = workshop.results()
    shutil.move(workshop.out, tmp_path / "old")
    workshop.write(plan("new"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_everywhere.py")],
        cwd=tmp_path,
        env={**workshop.environment, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [status for _, status, *_ in lines] == [-SIGKILL] * (len(lines) - 1) + [0]
    assert len(lines) > 30, "changes of files in three steps"
    whole = [by_directory(results) for results in (old, new)]
    for change, _, killed, status, resumed in lines:
        for directory, files in by_directory(killed).items():
            if directory != "mesh":
                assert files in [each[directory] for each in whole], change
        assert status == 0, change
        assert resumed == new, change
