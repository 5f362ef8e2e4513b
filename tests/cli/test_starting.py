from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console
from trtmesh.cli.output import say
from trtmesh.cli.starting import SERVES, progress


def test_a_terminal_shows_what_is_not_serving_and_logs_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress(Console(file=screen, force_terminal=True, width=100)) as tell:
        tell("tokenizer-0", SERVES)
        tell("engine-0", "reads the weights")
        say("a line of a log")
    shown = screen.getvalue()
    assert "engine-0 reads the weights" in shown
    assert "a line of a log" in shown
    assert SERVES not in shown
    # The line is gone at the end.
    assert shown.endswith("\x1b[2K")


def test_a_pipe_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(Console(file=io.StringIO())) as tell:
        tell("engine-0", "reads the weights")
        tell("engine-0", SERVES)
    assert capsys.readouterr().err.splitlines() == ["engine-0 reads the weights", "engine-0 serves"]
