"""The report as one page: nothing on it is loaded from elsewhere, and all text on it is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from trtmesh.chassis.quoting import escaped
from trtmesh.tools.bench.figures import TOTALS, Figures, Report
from trtmesh.tools.bench.measures import E2E, GAP, MEASURES, STALL_MS, TPOT, TTFT, Measure
from trtmesh.tools.bench.pools import Values, pool
from trtmesh.tools.bench.record import Answer, MetricsSample
from trtmesh.tools.bench.reports import plots
from trtmesh.tools.bench.reports.plots import Band, Plot, Point, Series, cumulative, steps
from trtmesh.tools.bench.reports.tables import SWEEP_HEADS, between, number, sweep_row
from trtmesh.tools.bench.saturation import knee, saturation, users_between

SLICES = 120
MOST_DOTS = 1500
SECONDS = "seconds since the start"


def templates() -> Environment:
    return Environment(
        loader=PackageLoader("trtmesh.tools.bench.reports", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
    )


def as_html(report: Report) -> bytes:
    started = datetime.fromtimestamp(report.runs[0].run.header.started_unix_s, UTC)
    return (
        templates()
        .get_template("page.html")
        .render(
            report=report,
            started=f"{started:%Y-%m-%d %H:%M:%S} UTC",
            sweep_heads=[head.replace("\n", " ") for head in SWEEP_HEADS],
            sweep_row=sweep_row,
            sweep_plots=[*sweep_plots(report)] if report.is_sweep else [],
            distributions=[*distributions(report)],
            timeline=timeline,
            server_plots=server_plots,
            saturation=saturation,
            measures=MEASURES,
            totals=TOTALS,
            number=number,
            between=between,
            plots=plots,
        )
        .encode()
    )


def _visible(value: object) -> object:
    """Control characters of strangers' texts by their names; a page cannot hold lone surrogates at all."""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def distributions(report: Report) -> Iterator[Plot]:
    for measure in (TTFT, GAP, E2E):
        own = [(run.load, pool(measure, run.run.answers).values) for run in report.runs]
        curves = [Series(load, cumulative(each[each > 0])) for load, each in own]
        x = f"{measure.name}, {measure.unit}"
        yield Plot(f"{measure.name}, cumulative", x, "% of values", curves, is_log=True)


def sweep_plots(report: Report) -> Iterator[Plot]:
    """Latencies against throughput, with the knee."""
    for measure in (TTFT, TPOT, E2E):
        curves = [_against_throughput(report, measure, percent) for percent in (50, 99)]
        x = "output tokens per second"
        yield Plot(f"{measure.name} against throughput", x, f"{measure.name}, ms", curves)


def _against_throughput(report: Report, measure: Measure, percent: int) -> Series:
    """One percentile of each run; the loads stand at the lower curve."""
    found = [
        (run.output_token_throughput, seen.percentiles[percent], run.load)
        for run in report.runs
        if run.output_token_throughput is not None and (seen := run.distributions.get(measure.tag))
    ]
    points = [(x, y) for x, y, _ in found]
    bend = knee(points)
    labels = [
        f"{_load_label(load)}{', knee' if number == bend else ''}"
        for number, (_, _, load) in enumerate(found)
    ]
    shown = labels if percent == 50 else ()
    return Series(f"p{percent}", points, has_dots=True, labels=shown)


def _bands(run: Figures) -> Sequence[Band]:
    end = run.run.end
    return [
        Band(each.at_s, each.ended_s, f"{each.kind} {each.target}")
        for each in (end.disruptions if end else ())
    ]


def timeline(run: Figures) -> Sequence[Plot]:
    """Load, tokens, first tokens and longest gaps over the time of the run, with its disruptions."""
    answers, bands = run.run.answers, _bands(run)
    edges = np.linspace(0, max(each.ended_s for each in answers) or 1.0, SLICES + 1)
    width = float(edges[1])
    users = users_between(answers, edges)
    tokens = _tokens_between(answers, edges) / width
    first = [(each.planned_s, value) for each in answers if each.ok for value in TTFT.of(each)]
    gaps = [
        (after, 1000 * (after - before))
        for each in answers
        if each.ok and len(each.arrivals_s) > 1
        for before, after in [max(pairwise(each.arrivals_s), key=lambda pair: pair[1] - pair[0])]
    ]
    stalls = sum(gap > STALL_MS for _, gap in gaps)
    found = (
        ("Requests under way", "requests", Series("requests", steps(edges, users))),
        ("Tokens received", "tokens per second", Series("tokens", steps(edges, tokens))),
        ("TTFT by planned time", "ms", _dots("TTFT", first)),
        (f"Longest gap of each answer, by its end; {stalls} over 1 s", "ms", _dots("gap", gaps)),
    )
    return [Plot(title, SECONDS, y, [series], bands) for title, y, series in found]


def server_plots(run: Figures) -> Sequence[Plot]:
    """Each metric of the server that changed during the run: gauges, counters per second, and the means of what was
    both counted and summed."""
    samples, bands = run.run.samples, _bands(run)
    gauges = sorted({name for sample in samples for name in sample.gauges})
    counters = sorted({name for sample in samples for name in sample.counters})
    means = [name.removesuffix("_sum") for name in counters if name.endswith("_sum")]
    halves = {f"{name}{end}" for name in means for end in ("_sum", "_count")}
    found = [
        *((f"{name}, mean", _means(samples, name)) for name in means),
        *(
            (f"{name}, per second", _rates(samples, name))
            for name in counters
            if name not in halves
        ),
        *((name, _values(samples, name)) for name in gauges),
    ]
    return [
        Plot(title, SECONDS, "", [Series(title, points)], bands)
        for title, points in sorted(found)
        if len({value for _, value in points}) > 1
    ]


def _values(samples: Sequence[MetricsSample], name: str) -> Sequence[Point]:
    return [(each.at_s, each.gauges[name]) for each in samples if name in each.gauges]


def _grown(samples: Sequence[MetricsSample], name: str) -> Sequence[tuple[float, float, float]]:
    """Time, seconds since the sample before, and growth; a counter that fell began anew."""
    known = [(each.at_s, each.counters[name]) for each in samples if name in each.counters]
    return [
        (at, at - before, now - past if now >= past else now)
        for (before, past), (at, now) in pairwise(known)
    ]


def _rates(samples: Sequence[MetricsSample], name: str) -> Sequence[Point]:
    return [(at, growth / seconds) for at, seconds, growth in _grown(samples, name) if seconds > 0]


def _means(samples: Sequence[MetricsSample], name: str) -> Sequence[Point]:
    sums, counts = (_grown(samples, f"{name}{end}") for end in ("_sum", "_count"))
    together = zip(sums, counts, strict=False)
    return [(at, total / count) for (at, _, total), (_, _, count) in together if count > 0]


def _tokens_between(answers: Sequence[Answer], edges: Values) -> Values:
    """Chunks of unknown size count as one token."""
    arrivals = [at for each in answers for at in each.arrivals_s]
    tokens = [count or 1 for each in answers for count in each.tokens]
    return np.histogram(arrivals, edges, weights=tokens)[0].astype(np.float64)


def _dots(name: str, points: Sequence[Point]) -> Series:
    """Of many points the highest, and an even choice of the others."""
    if len(points) > MOST_DOTS:
        by_height = sorted(points, key=lambda point: -point[1])
        highest, others = by_height[: MOST_DOTS // 2], by_height[MOST_DOTS // 2 :]
        points = [*highest, *others[:: -(-2 * len(others) // MOST_DOTS)]]
    return Series(name, points, has_line=False, has_dots=True)


def _load_label(load: str) -> str:
    """Its number: `16 at a time` of `closed, 16 at a time`."""
    return load.partition(", ")[2] or load
