"""Reports for a terminal, or a line a row in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from trtmesh.cli.tables import add_row, new_table
from trtmesh.tools.bench.comparison import Comparison, Ratio
from trtmesh.tools.bench.figures import TOTALS, Figures, Report
from trtmesh.tools.bench.intervals import Interval
from trtmesh.tools.bench.measures import E2E, MEASURES, TPOT, TTFT
from trtmesh.tools.bench.pools import Distribution
from trtmesh.tools.bench.record import AnswerOutcome


def number(value: float | None) -> str:
    """Four digits that count."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def between(own: Interval | None) -> str:
    return f"{number(own.low)}..{number(own.high)}" if own else ""


def run_tables(figures: Figures) -> Sequence[Table]:
    """Distributions, then totals."""
    measures = new_table(
        "figure", "unit", "mean", "95 %", "p50", "95 %", "p90", "p99", "95 %", "max", "of"
    )
    for measure in MEASURES:
        if seen := figures.distributions.get(measure.tag):
            own = figures.intervals[measure.tag]
            add_row(
                measures,
                measure.name,
                measure.unit,
                number(seen.avg),
                between(own.get("avg")),
                number(seen.percentiles[50]),
                between(own.get("p50")),
                number(seen.percentiles[90]),
                number(seen.percentiles[99]),
                between(own.get("p99")),
                number(seen.max),
                seen.count,
            )
    totals = new_table("total", "unit", "value", remark="definition")
    for total in TOTALS:
        if (value := total.of(figures)) is not None:
            add_row(totals, total.name, total.unit, number(value), total.definition)
    return [measures, totals]


SWEEP_MEASURES = (TTFT, TPOT, E2E)
SWEEP_HEADS = (
    *("load", "ok", "failed", "requests\n/s", "tokens\n/s", "good"),
    *(f"{measure.name}\n{percent} ms" for measure in SWEEP_MEASURES for percent in ("p50", "p99")),
)


def sweep_table(report: Report) -> Table:
    """A row for each run."""
    table = new_table(*SWEEP_HEADS)
    for run in report.runs:
        add_row(table, *sweep_row(run))
    return table


def sweep_row(figures: Figures) -> Iterator[str]:
    ok = figures.counts[AnswerOutcome.OK]
    yield from (figures.load, str(ok), str(len(figures.run.answers) - ok))
    yield number(figures.request_throughput)
    yield number(figures.output_token_throughput)
    yield f"{figures.goodput.attainment:.1%}" if figures.goodput else "-"
    for measure in SWEEP_MEASURES:
        seen: Distribution | None = figures.distributions.get(measure.tag)
        yield from (number(seen.percentiles[percent]) if seen else "-" for percent in (50, 99))


def comparison_line(of: Comparison) -> str:
    """What was compared, and how many answers are equal."""
    share = f" ({of.identical / of.compared:.1%})" if of.compared else ""
    parts = [
        f"{of.load}: {of.pairs} prompts in both",
        f"{of.only_a} only in A, {of.only_b} only in B",
        f"not ok: {of.failed_a} in A, {of.failed_b} in B",
        f"identical: {of.identical} of {of.compared}{share}",
    ]
    if of.prompts_differ:
        parts.append(f"other prompt tokens: {of.prompts_differ}, so the servers read other prompts")
    return "; ".join(parts)


def comparison_table(ratios: Sequence[Ratio]) -> Table:
    table = new_table("figure", "of", "unit", "A", "B", "B / A", "interval", "verdict")
    for each in ratios:
        statistic = "mean" if each.statistic == "avg" else each.statistic
        add_row(
            table,
            each.name,
            statistic,
            each.unit,
            number(each.a),
            number(each.b),
            f"{each.ratio:.3f}",
            f"{each.interval.low:.3f}..{each.interval.high:.3f}" if each.interval else "",
            each.verdict,
        )
    return table
