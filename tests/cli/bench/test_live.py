"""What a terminal shows while a run happens."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from cli.bench.runs import HEADER, answer
from rich.console import Console
from trtmesh.tools.bench.live import LiveView, live_view
from trtmesh.tools.bench.record import AnswerOutcome


def drawn_of(view: LiveView) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=200).print(view)
    return out.getvalue().splitlines()[-1].split()


def test_the_view_counts_what_ended() -> None:
    now = 100.0
    view = LiveView(10, lambda: now)

    assert drawn_of(view)[:4] == ["connects", "and", "warms", "up"]
    view.tell(HEADER)
    now = 102.0
    view.tell(answer(0, (0.1, 0.3)))
    view.tell(answer(1, (0.2, 1.7, 1.8)))
    view.tell(replace(answer(2, ()), outcome=AnswerOutcome.ERROR))

    # 5 tokens in 2 seconds; TTFT of 100 and 200 ms.
    assert drawn_of(view)[-9:] == ["2", *["3", "of", "10"], "1", "2.5", "200.0", "200.0", "1500.0"]


def test_a_pipe_sees_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with live_view(3) as tell:
        tell(HEADER)
        tell(answer(0, (1.0,)))

    assert capfd.readouterr() == ("", "")
