"""What is seen of a run while it happens."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import pytest
from cli.bench.runs import HEADER, answer
from trtmesh.tools.bench import live
from trtmesh.tools.bench.live import LiveView, live_view
from trtmesh.tools.bench.record import AnswerOutcome

PATIENCE_SECONDS = 60.0


def test_the_view_counts_what_ended() -> None:
    now = 100.0
    view = LiveView(HEADER.load, 10, lambda: now)

    assert str(view) == "closed, 4 at a time: measures the client, connects and warms up"
    view.tell(HEADER)
    now = 102.0
    assert str(view) == "closed, 4 at a time: 2 s, 0 of 10 ended, 0 not ok"
    view.tell(answer(0, (0.1, 0.3)))
    view.tell(answer(1, (0.2, 1.7, 1.8)))
    view.tell(replace(answer(2, ()), outcome=AnswerOutcome.ERROR))

    # 5 tokens in 2 seconds; TTFT of 100 and 200 ms.
    assert str(view) == (
        "closed, 4 at a time: 2 s, 3 of 10 ended, 1 not ok, 2 tokens/s, TTFT p50 200.0 ms, p99 200.0 ms,"
        " longest gap 1500.0 ms"
    )


async def test_a_pipe_gets_lines_until_the_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FIRST_LINE_S", 0.001)
    seen, deadline = "", time.monotonic() + PATIENCE_SECONDS
    async with live_view(HEADER.load, 3) as tell:
        tell(HEADER)
        tell(answer(0, (1.0,)))
        while "1 of 3 ended" not in seen and time.monotonic() < deadline:
            seen += capfd.readouterr().err
            await asyncio.sleep(0.01)
    assert re.search(r"closed, 4 at a time: \d+ s, 1 of 3 ended, 0 not ok", seen)
    capfd.readouterr()
    assert capfd.readouterr() == ("", "")
