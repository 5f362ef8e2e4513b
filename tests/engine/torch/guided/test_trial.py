"""The process that compiles a grammar first: it reads grammars of any size, and is never waited for without end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from subprocess import Popen
from typing import IO

import pytest
from trtmesh.engine.backends.torch.guided import trial

pytestmark = pytest.mark.slow

COMMENTS = f"// {'x' * 97}\n"


def overdue() -> Callable[[], None]:
    """A check that fails a test which would hang."""
    last = time.monotonic() + 60

    def check() -> None:
        assert time.monotonic() < last, "still waiting for the process"

    return check


@pytest.mark.parametrize("check_seconds", [trial.CHECK_SECONDS, 1e-6])
@pytest.mark.parametrize("lines", [20, 1000])
def test_grammar_of_any_size_is_read_whole(
    lines: int, check_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also above the size of a pipe, and where the process is slow to read."""
    monkeypatch.setattr(trial, "CHECK_SECONDS", check_seconds)
    assert trial.problem_of_trial('start: "a"\n' + COMMENTS * lines, overdue()) == ""


def test_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[Popen[bytes]]()

    def endless(grammar: IO[bytes]) -> Popen[bytes]:
        begun.append(Popen((sys.executable, "-c", "import time; time.sleep(3600)"), stdin=grammar))
        return begun[-1]

    monkeypatch.setattr(trial, "_begun", endless)
    monkeypatch.setattr(trial, "MOST_SECONDS", 0.1)
    problem = trial.problem_of_trial('start: "a"\n' + COMMENTS * 20, overdue())
    assert "more than 0.1 s" in problem
    assert begun[0].returncode is not None
