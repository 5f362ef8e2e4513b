"""What is seen of a run while it happens: a line on standard error, drawn again on a terminal, and now and then in a
pipe."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text
from trtmesh.cli.output import say
from trtmesh.tools.bench.measures import first_token_ms, longest_gap_ms
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Header, Line, Load

REFRESHES_PER_SECOND = 2
"""Drawing takes time from the sending."""
FIRST_LINE_S, MOST_S = 2.0, 30.0
"""Until the first line of a pipe; each next one comes after twice the time, at most so late."""
RECENT = 500
"""Latest answers, of which the latencies are."""


class LiveView:
    """Is told the lines of the record; on a terminal a thread of rich's reads it."""

    def __init__(self, load: Load, items: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._items = items
        self._clock = clock
        self._started: float | None = None
        self._counts: Counter[AnswerOutcome] = Counter()
        self._tokens = 0
        self._firsts: deque[float] = deque(maxlen=RECENT)
        self._longest_gap = 0.0

    def tell(self, line: Line) -> None:
        if isinstance(line, Header):
            self._started = self._clock()
        elif isinstance(line, Answer):
            self._counts[line.outcome] += 1
            if line.ok:
                self._tokens += line.output_tokens or 0
                self._firsts.extend(first_token_ms(line))
                self._longest_gap = max([self._longest_gap, *longest_gap_ms(line)])

    def __str__(self) -> str:
        if self._started is None:
            return f"{self._load}: measures the client, connects and warms up"
        seconds, ended = self._clock() - self._started, self._counts.total()
        shown = (
            f"{self._load}: {seconds:.0f} s, {ended} of {self._items} ended,"
            f" {ended - self._counts[AnswerOutcome.OK]} not ok"
        )
        if firsts := sorted(self._firsts.copy()):
            p50, p99 = (firsts[len(firsts) * percent // 100] for percent in (50, 99))
            shown += (
                f", {self._tokens / max(seconds, 1e-9):,.0f} tokens/s, TTFT p50 {p50:.1f} ms, p99 {p99:.1f} ms,"
                f" longest gap {self._longest_gap:.1f} ms"
            )
        return shown


@asynccontextmanager
async def live_view(load: Load, items: int) -> AsyncIterator[Callable[[Line], None]]:
    """Shows a run of so many items while it happens."""
    view, console = LiveView(load, items), Console(stderr=True)
    if console.is_terminal:
        with Live(
            get_renderable=lambda: Text(str(view)),
            console=console,
            transient=True,
            redirect_stdout=False,
            refresh_per_second=REFRESHES_PER_SECOND,
        ):
            yield view.tell
        return
    lines = asyncio.create_task(_lines(view))
    try:
        yield view.tell
    finally:
        lines.cancel()


async def _lines(view: LiveView) -> None:
    wait_s = FIRST_LINE_S
    while True:
        await asyncio.sleep(wait_s)
        say(str(view))
        wait_s = min(2 * wait_s, MOST_S)
