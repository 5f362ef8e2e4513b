"""The other ranks of engines in this process, without their imports. Those of engine processes are executed."""

from __future__ import annotations

import json
import os
from multiprocessing import Pipe
from typing import Any

import pytest
from engine.torch.parallel.followers import rank_server
from forks import start_module
from trtmesh.engine.backends.torch.parallel import ranks


def start_rank(name: str, task: dict[str, Any]) -> ranks._Other:
    ours, theirs = Pipe()
    with theirs:
        # The connection is its standard input.
        process = start_module(
            rank_server(),
            ranks.PROGRAM,
            ["0"],
            os.environ,
            stdin=theirs.fileno(),
            stdout=ranks.STANDARD_ERROR,
            stderr=None,
        )
    ours.send_bytes(json.dumps(task).encode())
    return ranks._Other(f"{name} (process {process.pid})", process, ours)


@pytest.fixture(autouse=True)
def ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_start", start_rank)
