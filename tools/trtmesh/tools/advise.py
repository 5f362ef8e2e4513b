"""`trtmesh advise`: how many engines, routers and tokenizers a load needs."""

from __future__ import annotations

import asyncio
import json as json_module
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.extras import check_extras
from trtmesh.cli.option_groups import grouped, option
from trtmesh.cli.output import put, say
from trtmesh.cli.session import FAILED, OK, end_with
from trtmesh.cli.tables import add_row, new_table, print_tables

if TYPE_CHECKING:
    from trtmesh.tools.advising.forecast import Forecast
    from trtmesh.tools.advising.mesh import Observed, Rates
    from trtmesh.tools.fleet_replay.fleet_model import FleetModel
    from trtmesh.tools.fleet_replay.trace import Arrival

ROUTER_US, ROUTER_ITEM_US = 13.0, 420.0
"""CPU of a router for each generated token, by `make bench B=data_path` with 64 streams; for each item, estimated."""
TOKENIZER_US, ENCODE_US = 2.4, 2.4
"""CPU of a tokenizer for each generated token, likewise; for each prompt token, estimated."""
BUSY = 0.6
"""Share of a core that a router or tokenizer may take on average."""

BEYOND = 2.0
"""Step times of so many times more sequences than were seen are extrapolated."""
LEAST_BEYOND = 10
"""Answers that have to lie beyond a percentile, as for the intervals of `trtmesh bench`."""
LEAST_DURATIONS = 10
"""Least duration of a load, in durations of an answer: simulated fleets start empty."""

RATES, LOAD = "Rates of a worker", "Load"


@dataclass(frozen=True, slots=True)
class AdvisedLoad:
    """Which load."""

    metrics: list[str] | None = option(
        "Metrics of a router of a running mesh, for its rates, and for its load where no FILE is given."
        " Repeatable: all routers.",
        metavar="URL",
        panel=LOAD,
    )
    watch: float = option(
        "Seconds between two looks at the metrics for the load.", default=60.0, min=1.0, panel=LOAD
    )
    model: str = option("Model of the mesh; needed if it serves several.", default="", panel=LOAD)
    rate: float | None = option(
        "Items per second on average, in place of the recorded or observed ones.",
        min=0.001,
        panel=LOAD,
    )
    items: int = option(
        "Most items of a replay: of a longer trace the busiest so many in a row.",
        default=10_000,
        min=10,
        max=1_000_000,
        panel=LOAD,
    )


@dataclass(frozen=True, slots=True)
class AdvisedWorker:
    """How fast and how large a worker is."""

    prefill_tokens_per_second: float | None = option(
        "Prompt tokens per second; by default as the routers of --metrics have learned.",
        min=1.0,
        panel=RATES,
    )
    step_ms: float | None = option(
        "Time of a step without its sequences; likewise.", min=0.001, panel=RATES
    )
    step_ms_per_sequence: float | None = option(
        "Further time for each sequence in it; likewise.", min=0.0, panel=RATES
    )
    cache_tokens: int = option("Tokens of KV in its pool.", default=500_000, min=1, panel=RATES)
    max_batch_size: int = option("Most sequences of a step.", default=256, min=1, panel=RATES)
    prefill_tokens_per_step: int = option(
        "Most prompt tokens of a step.", default=2048, min=1, panel=RATES
    )

    def fleet_model(self, learned: Rates) -> FleetModel:
        """Raises SettingsError for a rate that nobody knows."""
        from trtmesh.tools.fleet_replay.fleet_model import FleetModel

        def known(setting: str, given: float | None, seen: float | None) -> float:
            if given is None and seen is None:
                raise SettingsError(
                    "is unknown: give it, or a router that has learned it under load with --metrics",
                    setting=setting,
                )
            return given if given is not None else seen or 0.0

        prefill = self.prefill_tokens_per_second, learned.prefill_tokens_per_second
        step = self.step_ms, learned.step_ms
        per_sequence = self.step_ms_per_sequence, learned.step_ms_per_sequence
        return FleetModel(
            prefill_tokens_per_second=known("--prefill-tokens-per-second", *prefill),
            step_seconds=known("--step-ms", *step) / 1000,
            step_seconds_per_sequence=known("--step-ms-per-sequence", *per_sequence) / 1000,
            cache_tokens=self.cache_tokens,
            max_batch_size=self.max_batch_size,
            prefill_tokens_per_step=self.prefill_tokens_per_step,
        )


@dataclass(slots=True)
class Advice:
    """What is reported."""

    load: dict[str, float] = field(default_factory=dict)
    routers: int = 1
    tokenizers: int = 1
    fleets: list[dict[str, Any]] = field(default_factory=list)
    """The best one first."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


@grouped
def advise(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Records of routers (router.record.file), Mooncake's, Azure's or BurstGPT's traces, merged by time;"
            " - for standard input. Without one the load is that of --metrics."
        ),
    ] = None,
    *,
    slo: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:MS",
            help="Limits in milliseconds that a good answer keeps, as 'ttft:500 tpot:50'; also itl and e2e."
            " Repeatable.",
        ),
    ],
    attainment: Annotated[
        float, typer.Option(min=0.01, max=0.9999, help="Share of answers that must keep them all.")
    ] = 0.99,
    load: AdvisedLoad,
    worker: AdvisedWorker,
    most_engines: Annotated[
        int, typer.Option(min=1, max=4096, help="Most engines to think of.")
    ] = 256,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="N|P+D",
            help="Forecast so many engines, 3 mixed ones or 1+2 of prefill and decode, and search none.",
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="Compare the forecast with this record of `bench serve --as-recorded`: the same load before such"
            " engines."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say how many engines, routers and tokenizers a load needs to keep its SLOs.

    Each number of engines is tried in a replay of the load with the mesh's own placement and scheduler, in virtual
    time; mixed engines are compared with prefill and decode ones.

    Exit status: 0 done, 1 no number of engines keeps the SLOs or a file cannot be read, 2 wrong usage or an unknown
    rate.
    """
    end_with(
        lambda: _advise(
            files or [], slo, attainment, load, worker, most_engines, engines, check, json=json
        )
    )


def _advise(
    files: Sequence[Path],
    slo: Sequence[str],
    attainment: float,
    load: AdvisedLoad,
    worker: AdvisedWorker,
    most_engines: int,
    engines: str | None,
    check: Path | None,
    *,
    json: bool,
) -> int:
    check_extras(["bench"])
    # Need numpy, and the router's and the engine's code.
    from trtmesh.tools.advising.forecast import Counts, check_of, forecast, simulated_slos
    from trtmesh.tools.advising.search import Search
    from trtmesh.tools.bench.run_file import read_runs

    slos = simulated_slos(slo)
    fixed = None if engines is None else Counts.parse(engines, "--engines")
    measured = None if check is None else read_runs(check)[0]
    learned, observed = asyncio.run(_look(load, watches=not files))
    model = worker.fleet_model(learned)
    advice = Advice()
    arrivals = _arrivals(files, load, observed, advice)

    def probe(counts: Counts) -> Forecast:
        found = forecast(arrivals, model, counts, slos)
        say(f"{counts}: {found.attainment:.2%} good")
        return found

    search = Search(probe, attainment, most_engines)
    if fixed:
        fleets = [probe(fixed)]
    else:
        mixed = search.mixed(_guess(arrivals, model))
        # Beyond one engine more the comparison is over.
        halves = search.disaggregated(mixed.counts.total + 1 if mixed else search.largest)
        if mixed and not halves:
            advice.doubts.append(
                f"{mixed.counts.total + 1} prefill and decode engines are too few; more were not tried"
            )
        fleets = sorted(filter(None, (mixed, halves)), key=lambda each: each.counts.total)
    _describe(advice, arrivals, model)
    _doubt(advice, arrivals, fleets, attainment, learned)
    advice.fleets = [each.figures() for each in fleets]
    if measured and fleets:
        advice.checks = check_of(fleets[0], measured)
    if json:
        put(json_module.dumps(asdict(advice)))
    else:
        _print(advice)
    return OK if fleets and (fixed or search.holds(fleets[0])) else FAILED


async def _look(load: AdvisedLoad, *, watches: bool) -> tuple[Rates, Observed | None]:
    """The rates of a running mesh, and its load."""
    from trtmesh.tools.advising.mesh import Rates, load_between, pages_of, rates_of

    if not load.metrics:
        if watches:
            raise SettingsError("give a trace, or the metrics of a running mesh with --metrics")
        return Rates(), None
    before = await pages_of(load.metrics)
    if not watches:
        return rates_of(before, load.model), None
    await asyncio.sleep(load.watch)
    after = await pages_of(load.metrics)
    return rates_of(after, load.model), load_between(before, after, load.watch, load.model)


def _arrivals(
    files: Sequence[Path], load: AdvisedLoad, observed: Observed | None, advice: Advice
) -> list[Arrival]:
    """The load, at the rate asked for."""
    from trtmesh.tools.fleet_replay.trace import read_trace

    if observed:
        number = min(load.items, max(1000, round(600 * observed.items / observed.seconds)))
        arrivals = observed.arrivals(number, seed=0)
        advice.assumptions.append(
            f"{number} items drawn like the {observed.items:.0f} of {observed.seconds:g} s: lengths by histograms,"
            " independent of each other, at random times (poisson)"
        )
        if observed.items < 100:
            advice.doubts.append("fewer than 100 items were observed; watch longer (--watch)")
    else:
        arrivals = read_trace(*files)
        if guessed := sum(each.guessed for each in arrivals):
            advice.doubts.append(
                f"{guessed} of {len(arrivals)} items have unknown lengths; the mean of the others is taken"
            )
    if (more := len(arrivals) - load.items) > 0:
        first = min(
            range(more + 1),
            key=lambda n: arrivals[n + load.items - 1].seconds - arrivals[n].seconds,
        )
        advice.assumptions.append(
            f"the busiest {load.items} of {len(arrivals)} items, {arrivals[first].seconds:.0f} s after the first"
        )
        arrivals = arrivals[first : first + load.items]
    if not any(each.blocks for each in arrivals):
        advice.doubts.append(
            "no prefixes are known, so nothing is reused; a record of the router has them"
        )
    start, lasts = arrivals[0].seconds, arrivals[-1].seconds - arrivals[0].seconds
    if load.rate and not lasts:
        raise SettingsError("scales times, but all items come at once", setting="--rate")
    scale = (len(arrivals) - 1) / lasts / load.rate if load.rate else 1.0
    if scale != 1.0:
        advice.assumptions.append(f"times of arrival are scaled by {scale:.3g}, to --rate")
    return [replace(each, seconds=(each.seconds - start) * scale) for each in arrivals]


def _guess(arrivals: Sequence[Arrival], model: FleetModel) -> int:
    """About how many engines have the time for the load."""
    prompts = sum(each.prompt_tokens for each in arrivals) / model.prefill_tokens_per_second
    step = model.step_seconds_per_sequence + model.step_seconds / 64
    steps = sum(each.new_tokens for each in arrivals) * step
    return math.ceil((prompts + steps) / max(arrivals[-1].seconds, 1.0))


def _describe(advice: Advice, arrivals: Sequence[Arrival], model: FleetModel) -> None:
    """Adds the load, what beside engines it needs, and on which assumptions."""
    lasts = max(arrivals[-1].seconds, 1.0)
    items = len(arrivals) / lasts
    old = sum(each.prompt_tokens for each in arrivals) / lasts
    new = sum(each.new_tokens for each in arrivals) / lasts
    advice.load = {
        "items": len(arrivals),
        "seconds": round(lasts, 1),
        "items_per_second": round(items, 3),
        "prompt_tokens_per_second": round(old, 1),
        "new_tokens_per_second": round(new, 1),
    }
    advice.routers = math.ceil((ROUTER_US * new + ROUTER_ITEM_US * items) / 1e6 / BUSY)
    advice.tokenizers = math.ceil((TOKENIZER_US * new + ENCODE_US * old) / 1e6 / BUSY)
    worker = (
        f"a worker computes {model.prefill_tokens_per_second:.0f} prompt tokens/s, and a step of n sequences in"
        f" {model.step_seconds * 1000:.2f} + {model.step_seconds_per_sequence * 1000:.3f} n ms; at most"
        f" {model.max_batch_size} sequences and {model.prefill_tokens_per_step} prompt tokens a step; KV of"
        f" {model.cache_tokens} tokens, {model.kv_token_bytes} bytes each, handed over at"
        f" {model.kv_bytes_per_second / 1e9:g} GB/s"
    )
    services = (
        f"a router takes {ROUTER_US:g} µs of CPU a new token and {ROUTER_ITEM_US:g} an item, a tokenizer"
        f" {TOKENIZER_US:g} a new and {ENCODE_US:g} a prompt token; each at most {BUSY:.0%} of a core"
    )
    advice.assumptions += [
        worker,
        services,
        "workers are equal and none is lost: for a failure add one, and a router and a tokenizer",
        "latencies are without router, tokenizer, network and client; policy auto; one sequence an item",
    ]


def _doubt(
    advice: Advice,
    arrivals: Sequence[Arrival],
    fleets: Sequence[Forecast],
    attainment: float,
    learned: Rates,
) -> None:
    """Adds why the forecast may be wrong."""
    if not fleets:
        advice.doubts.append("no allowed number of engines keeps the SLOs, or idle ones fail too")
    if len(arrivals) < (needed := math.ceil(LEAST_BEYOND / (1 - attainment))):
        advice.doubts.append(
            f"{len(arrivals)} items are too few for a share of {attainment:g}: {needed} show it"
        )
    whole = max((each.measures["E2E"].percentiles[50] / 1000 for each in fleets), default=0.0)
    if arrivals[-1].seconds < LEAST_DURATIONS * whole:
        advice.doubts.append(
            f"the load lasts {arrivals[-1].seconds:.0f} s, an answer {whole:.1f} s: simulated fleets start empty, and a"
            " longer load may need more"
        )
    most = max((each.sequences for each in fleets), default=0.0)
    if learned.sequences and most > BEYOND * learned.sequences:
        advice.doubts.append(
            f"step times were learned from {learned.sequences:.1f} sequences on average; the forecast has {most:.1f}"
        )


def _print(advice: Advice) -> None:
    put(", ".join(f"{name} {value:g}" for name, value in advice.load.items()))
    if advice.fleets:
        engines = advice.fleets[0]["engines"]
        put(f"needed: engines {engines}, routers {advice.routers}, tokenizers {advice.tokenizers}")
        columns = [{**each["shares"], **each["ms"]} for each in advice.fleets]
        table = new_table("forecast", *(each["engines"] for each in advice.fleets))
        for name in dict.fromkeys(name for column in columns for name in column):
            add_row(table, name, *(column.get(name, "") for column in columns))
        print_tables(table)
    if advice.checks:
        table = new_table(*advice.checks[0])
        for check in advice.checks:
            add_row(table, *check.values())
        print_tables(table)
    for text in advice.assumptions:
        put(f"assumption: {text}")
    for text in advice.doubts:
        put(f"doubt: {text}")
