from __future__ import annotations

import math
from pathlib import Path

import pytest
from trtmesh.chassis.cores import BYTES_PER_THREAD, granted_cores, threads_for


@pytest.mark.parametrize(
    ("weights", "cores", "threads"),
    [(0, 8, 1), (BYTES_PER_THREAD, 8, 1), (3 * BYTES_PER_THREAD, 8, 3), (10**12, 8, 8), (1, 0, 1)],
)
def test_threads_follow_the_weights_within_the_cores(
    weights: int, cores: int, threads: int
) -> None:
    assert threads_for(weights, cores) == threads


@pytest.mark.parametrize(
    ("limits", "granted"),
    [
        ({}, math.inf),
        ({"": "max 100000"}, math.inf),
        ({"": "150000 100000"}, 1.5),
        ({"": "400000 100000", "outer": "200000 100000", "outer/inner": "max 100000"}, 2.0),
    ],
)
def test_the_smallest_quota_around_a_process_counts(
    limits: dict[str, str], granted: float, tmp_path: Path
) -> None:
    own = tmp_path / "cgroup"
    own.write_text("1:name=systemd:/other\n0::/outer/inner\n")
    root = tmp_path / "fs"
    (root / "outer" / "inner").mkdir(parents=True)
    for group, limit in limits.items():
        (root / group / "cpu.max").write_text(f"{limit}\n")
    assert granted_cores(root, own) == granted
    assert granted_cores(root, tmp_path / "absent") == granted_cores(root, root / "absent")
