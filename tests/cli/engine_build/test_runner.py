"""The end of a tool, whatever the system says of its process group."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from trtmesh.tools.engine_build import runner


@pytest.mark.slow
@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
async def test_status_of_a_tool_survives_a_group_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    def gone(group: int, number: int) -> None:
        raise error

    monkeypatch.setattr(os, "killpg", gone)
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    async with runner.locked(tmp_path) as lock:
        with (tmp_path / "log").open("wb") as log:
            assert await runner.run_guarded(command, log, lock, lambda: None) == 3
