"""`trtmesh bench find`: the highest rate at which the SLOs hold."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.option_groups import grouped, option
from trtmesh.cli.output import put, say, say_error
from trtmesh.cli.session import FAILED, INTERRUPTED, OK, run
from trtmesh.tools.bench.options import ClientOptions, TargetOptions
from trtmesh.tools.bench.record import Load, Plan, Run
from trtmesh.tools.bench.report import ReportOptions
from trtmesh.tools.bench.slo import parse_slos
from trtmesh.tools.bench.targets.target import FORMS
from trtmesh.tools.bench.workloads.options import WorkloadOptions

if TYPE_CHECKING:
    from trtmesh.tools.bench.search import Found, Goal, Trial

FEWEST_REQUESTS = 20
"""Of a run, however low its rate."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What is searched, and how closely."""

    PANEL: ClassVar = "Search"

    attainment: float = option(
        "Share of the answers that must meet every SLO.", default=0.99, min=0.0, max=1.0
    )
    start: float = option(
        "Requests per second of the first run.", default=1.0, min=0.01, max=10_000.0
    )
    lowest: float = option("Lowest rate that is tried.", default=0.1, min=0.001, max=10_000.0)
    highest: float = option("Highest rate that is tried.", default=10_000.0, min=0.01, max=10_000.0)
    seconds: float = option("Seconds of sending of each run.", default=30.0, min=0.1, max=86_400.0)

    def goal(self) -> Goal:
        """Raises SettingsError."""
        from trtmesh.tools.bench.search import Goal

        if not self.lowest <= self.start <= self.highest:
            raise SettingsError(
                f"is {self.start:g} but must be from --lowest, {self.lowest:g}, to --highest, {self.highest:g}",
                setting="--start",
            )
        return Goal(self.attainment, self.start, self.lowest, self.highest)


@grouped
def find(
    target: Annotated[str, typer.Argument(help=f"Server: {FORMS}.")],
    *,
    connection: TargetOptions,
    workload: WorkloadOptions,
    search: SearchOptions,
    client: ClientOptions,
    reports: ReportOptions,
    seed: Annotated[int, typer.Option(help="Of the workload and of the times.")] = 0,
) -> None:
    """Find the highest rate of poisson arrivals at which the answers of TARGET meet the SLOs, by bisection.

    A rate holds if so many answers meet every --slo and the server does not fall behind. A run that leaves this open,
    by the interval of its share, is repeated.

    Exit status: 0 found, 1 no rate holds or the client was the bottleneck, 2 wrong usage, 130 Ctrl-C.
    """
    run(_find(target, connection, workload, search, client, reports, seed))


async def _find(
    target: str,
    connection: TargetOptions,
    workload: WorkloadOptions,
    search: SearchOptions,
    client: ClientOptions,
    reports: ReportOptions,
    seed: int,
) -> int:
    reports.check()
    if not reports.slo:
        raise SettingsError("is needed, as in --slo ttft:200", setting="--slo")
    # Need a second, and numpy.
    from trtmesh.tools.bench.echo import ClientTooSlow, check_client
    from trtmesh.tools.bench.measuring import Setup, measure, server_count, watching
    from trtmesh.tools.bench.search import find as found_by

    goal = search.goal()
    setup = Setup(connection.connecting(target), str(workload), client, seed)
    plans = await workload.plans(seed, await server_count(setup.connecting))
    if not plans:
        raise SettingsError("has no requests", setting="--workload")
    runs: list[Run] = []
    given_up = OK

    async def run_at(rate: float) -> Run | None:
        """None at Ctrl-C, and where the figures would be the client's."""
        nonlocal given_up
        number = max(FEWEST_REQUESTS, math.ceil(rate * search.seconds))
        before = sum(each.header.load.rate == rate for each in runs)
        # A repetition has other times; runs of other rates have the same ones, closer together.
        own = replace(setup, seed=seed + before)
        try:
            measured = await measure(
                own, Load("poisson", rate=rate), [*islice(repeated(plans), number)], watch
            )
            if client.echo:
                check_client(measured)
        except asyncio.CancelledError:
            given_up = INTERRUPTED
            return None
        except ClientTooSlow as error:
            say_error(str(error))
            given_up = FAILED
            return None
        runs.append(measured)
        given_up = INTERRUPTED if measured.is_interrupted else OK
        return None if given_up else measured

    async with watching(client) as watch:
        found = await found_by(run_at, parse_slos(reports.slo), goal, _say_trial)
    put(_verdict(found, goal))
    if any(each.answers for each in runs):
        in_order = sorted(runs, key=lambda each: each.header.load.rate or 0.0)
        reports.write(reports.figures(in_order))
    return given_up or watch.told() or (OK if found.holds is not None else FAILED)


def repeated(plans: Sequence[Plan]) -> Iterator[Plan]:
    """The workload again and again, each time with sessions of its own."""
    for lap in count():
        for plan in plans:
            yield replace(plan, session=f"{plan.session} {lap}") if plan.session else plan


def _say_trial(trial: Trial) -> None:
    behind = "; the server fell behind" if trial.is_behind else ""
    say(
        f"{trial.rate:.4g} requests/s: {trial.good} of {trial.counted} good"
        f" ({trial.attainment:.2%}){behind}"
    )


def _verdict(found: Found, goal: Goal) -> str:
    runs = f"{len(found.trials)} runs; {found.why}"
    if found.holds is None:
        fails = "" if found.fails is None else f": {found.fails:.4g} requests/s fail"
        return f"no rate holds{fails} ({runs})"
    fails = "" if found.fails is None else f", {found.fails:.4g} fail"
    return f"{found.holds:.4g} requests/s hold with {goal.attainment:.4g} of answers good{fails} ({runs})"
