"""A build killed at its changes of a file, while it replaces the results of an older plan.

The suite kills it at every sixth change; `make soak` at each, and builds of the other flow too.
"""

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


PRECISION = {"weights": "fp8", "kv_cache": "fp8"}


def plan(flow: str, revision: str) -> dict[str, Any]:
    """Downloads and quantizes; the TensorRT-engine flow builds an engine too."""
    model = {"revision": revision, "config": "tiny.json", "precisions": PRECISION, "tensor": 1}
    return plan_of(flow=flow, model=model)


def by_directory(results: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The published files by directory."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, content in results.items():
        if not any(part.startswith((".partial", ".replaced")) for part in Path(name).parts):
            found[str(Path(name).parent)][Path(name).name] = content
    return found


@pytest.mark.timeout(1800)  # It may run more than sixty builds, one after another.
@pytest.mark.parametrize(
    ("flow", "stride"),
    [
        ("tensorrt", 12),
        pytest.param("tensorrt", 1, marks=pytest.mark.soak),
        pytest.param("pytorch", 1, marks=pytest.mark.soak),
    ],
)
def test_no_kill_leaves_half_a_result_and_each_is_made_up_for(
    tmp_path: Path, flow: str, stride: int
) -> None:
    workshop = Workshop(tmp_path).write(plan(flow, "new"))
    assert workshop.run().returncode == 0
    new = workshop.results()
    shutil.rmtree(workshop.out)
    workshop.write(plan(flow, "old"))
    assert workshop.run().returncode == 0
    old = workshop.results()
    shutil.move(workshop.out, tmp_path / "old")
    workshop.write(plan(flow, "new"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_everywhere.py"), str(stride)],
        cwd=tmp_path,
        env={**workshop.environment, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [status for _, status, *_ in lines] == [-SIGKILL] * (len(lines) - 1) + [0]
    assert len(lines) > 20 / stride, "two dozen changes of files"
    print(f"{len(lines) - 1} kills")
    whole = [by_directory(results) for results in (old, new)]
    for change, _, killed, status, resumed in lines:
        for directory, files in by_directory(killed).items():
            if directory != "mesh":
                assert files in [each[directory] for each in whole], change
        assert status == 0, change
        assert resumed == new, change
