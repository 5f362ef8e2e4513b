"""The figures of upstream's scripts, by their definitions and under their names."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.measures import duration_s
from trtmesh.tools.bench.record import Run

Figures = Mapping[str, float]
"""The table of `benchmark_core_model.py`."""


def figures_of(run: Run, prompt_tokens: Mapping[int, int]) -> Figures:
    """Of the answers that are ok; empty without one. A latency is the time from sending a request to its end.
    `prompt_tokens` are those known before, by index; the server's usage has the others."""
    ok = [answer for answer in run.answers if answer.ok]
    if not ok:
        return {}
    latencies = sorted(1000 * (answer.ended_s - answer.sent_s) for answer in ok)
    total_s, count = duration_s(ok), len(ok)
    inputs = sum(prompt_tokens.get(each.index) or each.prompt_tokens or 0 for each in ok)
    outputs = sum(
        sum(each.tokens) if each.output_tokens is None else each.output_tokens for each in ok
    )

    def percentile(percent: float) -> float:
        """A latency that so many percent do not exceed: one of them, without interpolation."""
        return latencies[math.ceil(count * percent / 100) - 1]

    return {
        "Requests/Sec": count / total_s,
        "OP tokens/sec": outputs / total_s,
        "Avg. latency (ms)": sum(latencies) / count,
        "P99 latency (ms)": percentile(99),
        "P90 latency (ms)": percentile(90),
        "Avg. IP tokens per request": inputs / count,
        "Avg. OP tokens per request": outputs / count,
        # Upstream leaves it at 0.
        "Avg. InFlight requests": sum(latencies) / 1000 / total_s,
        "Total latency (ms)": total_s * 1000,
        "Total requests": count,
    }


def boxed(rows: Figures) -> str:
    """As tabulate's `pretty` draws a table."""
    shown = [("Stat", "Value"), *((name, f"{value:.2f}") for name, value in rows.items())]
    widths = [max(len(row[column]) for row in shown) + 2 for column in (0, 1)]
    rule = "+" + "+".join("-" * width for width in widths) + "+"
    lines = [
        "|" + "|".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) + "|"
        for row in shown
    ]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def append_csv(path: Path, rows: Sequence[Figures]) -> None:
    """With the names at the beginning of a new file. Raises SettingsError."""
    try:
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if not file.tell():
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
