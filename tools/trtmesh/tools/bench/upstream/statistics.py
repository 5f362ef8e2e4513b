"""The figures of upstream's scripts, by their definitions and under their names."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.record import Answer, Run


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the answers that are ok. A latency is the time from sending a request to its end."""

    requests: int
    latencies_ms: tuple[float, ...]
    """Ascending."""
    total_s: float
    """From the first request's start to the last one's end."""
    prompt_tokens: int
    output_tokens: int

    @property
    def average_ms(self) -> float:
        return sum(self.latencies_ms) / self.requests

    @property
    def per_second(self) -> float:
        return self.requests / self.total_s

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.total_s

    def percentile_ms(self, percent: float) -> float:
        """A latency that so many percent do not exceed: one of them, without interpolation."""
        return self.latencies_ms[math.ceil(self.requests * percent / 100) - 1]

    def rows(self) -> Mapping[str, float]:
        """The table of `benchmark_core_model.py`, whose requests in flight upstream leaves at 0."""
        return {
            "Requests/Sec": self.per_second,
            "OP tokens/sec": self.tokens_per_second,
            "Avg. latency (ms)": self.average_ms,
            "P99 latency (ms)": self.percentile_ms(99),
            "P90 latency (ms)": self.percentile_ms(90),
            "Avg. IP tokens per request": self.prompt_tokens / self.requests,
            "Avg. OP tokens per request": self.output_tokens / self.requests,
            "Avg. InFlight requests": sum(self.latencies_ms) / 1000 / self.total_s,
            "Total latency (ms)": self.total_s * 1000,
            "Total requests": self.requests,
        }


def statistics_of(run: Run, prompt_tokens: Mapping[int, int]) -> Statistics | None:
    """None if nothing is ok. `prompt_tokens` are those known before, by index; the server's usage has the others."""
    ok = [answer for answer in run.answers if answer.ok]
    if not ok:
        return None
    return Statistics(
        len(ok),
        tuple(sorted(1000 * (answer.ended_s - answer.sent_s) for answer in ok)),
        max(answer.ended_s for answer in ok) - min(answer.sent_s for answer in ok),
        sum(prompt_tokens.get(each.index, each.prompt_tokens or 0) for each in ok),
        sum(map(_output_tokens, ok)),
    )


def _output_tokens(answer: Answer) -> int:
    return sum(answer.tokens) if answer.output_tokens is None else answer.output_tokens


def boxed(rows: Mapping[str, float]) -> str:
    """As tabulate's `pretty` draws a table."""
    shown = [("Stat", "Value"), *((name, f"{value:.2f}") for name, value in rows.items())]
    widths = [max(len(row[column]) for row in shown) + 2 for column in (0, 1)]
    rule = "+" + "+".join("-" * width for width in widths) + "+"
    lines = [
        "|" + "|".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) + "|"
        for row in shown
    ]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def append_csv(path: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """With the names at the beginning of a new file. Raises SettingsError."""
    try:
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if not file.tell():
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
