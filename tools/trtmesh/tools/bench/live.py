"""What a terminal shows while a run happens; a pipe sees nothing of it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from trtmesh.cli.tables import add_row, new_table
from trtmesh.tools.bench.measures import first_token_ms, longest_gap_ms
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Header, Line

REFRESHES_PER_SECOND = 2
"""Drawing takes time from the sending."""
RECENT = 500
"""Latest answers, of which the latencies are."""


class LiveView:
    """Is told the lines of the record, and drawn by a thread of its own."""

    def __init__(self, items: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._items = items
        self._clock = clock
        self._load = ""
        self._started = clock()
        self._counts: Counter[AnswerOutcome] = Counter()
        self._tokens = 0
        self._firsts: deque[float] = deque(maxlen=RECENT)
        self._longest_gap = 0.0

    def tell(self, line: Line) -> None:
        if isinstance(line, Header):
            self._load, self._started = str(line.load), self._clock()
        elif isinstance(line, Answer):
            self._counts[line.outcome] += 1
            if line.ok:
                self._tokens += line.output_tokens or 0
                self._firsts.extend(first_token_ms(line))
                self._longest_gap = max([self._longest_gap, *longest_gap_ms(line)])

    def __rich__(self) -> Table:
        elapsed = max(self._clock() - self._started, 1e-9)
        firsts = sorted(self._firsts.copy())
        p50, p99 = (
            f"{firsts[len(firsts) * percent // 100]:.1f}" if firsts else "-" for percent in (50, 99)
        )
        table = new_table(
            *("load", "seconds", "ended", "failed", "tokens\n/s"),
            *("TTFT\np50 ms", "TTFT\np99 ms", "longest\ngap ms"),
        )
        add_row(
            table,
            self._load or "connects and warms up",
            f"{elapsed:.0f}",
            f"{self._counts.total()} of {self._items}",
            self._counts.total() - self._counts[AnswerOutcome.OK],
            f"{self._tokens / elapsed:,.1f}",
            p50,
            p99,
            f"{self._longest_gap:.1f}",
        )
        return table


@contextmanager
def live_view(items: int) -> Iterator[Callable[[Line], None]]:
    """Shows a run of so many items on standard error while it happens."""
    view, console = LiveView(items), Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Live(
        get_renderable=view.__rich__,
        console=console,
        transient=True,
        redirect_stdout=False,
        refresh_per_second=REFRESHES_PER_SECOND,
    ):
        yield view.tell
