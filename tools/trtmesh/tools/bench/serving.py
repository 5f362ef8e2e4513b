"""A run for each load of `bench serve`, with its faults, and the report of all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import SettingsError, StartupError, TrtmeshError
from trtmesh.cli.output import put, say, say_error
from trtmesh.cli.session import FAILED, INTERRUPTED, OK
from trtmesh.tools.bench.echo import ClientTooSlow, check_client
from trtmesh.tools.bench.faults import DisruptionOptions
from trtmesh.tools.bench.measuring import Setup, Watch, batched, measure, server_count, watching
from trtmesh.tools.bench.options import ClientOptions, LoadOptions, TargetOptions
from trtmesh.tools.bench.record import AnswerOutcome, Load, Plan, Run
from trtmesh.tools.bench.report import ReportOptions
from trtmesh.tools.bench.targets.target import Url
from trtmesh.tools.bench.workloads.options import WorkloadOptions

if TYPE_CHECKING:
    from trtmesh.tools.bench.disruptions import Faults


async def served(
    target: str,
    connection: TargetOptions,
    workload: WorkloadOptions,
    load: LoadOptions,
    client: ClientOptions,
    disruption: DisruptionOptions,
    reports: ReportOptions,
    seed: int,
) -> int:
    reports.check()
    connecting = connection.connecting(target)
    turns = _turns(disruption, connecting.url, seed)
    if load.batch > 1 and connecting.url.protocol != "grpc":
        raise SettingsError("is for grpc:// alone", setting="--batch")
    setup = Setup(connecting, str(workload), client, seed, load.warmup, load.duration)
    loads = load.loads()
    plans = batched(await workload.plans(seed, await server_count(connecting)), load.batch)
    runs: list[Run] = []
    async with watching(client) as watch:
        ended = OK
        try:
            await _sweep(runs, setup, loads, plans, watch, turns)
        except asyncio.CancelledError:
            ended = INTERRUPTED
        except (TrtmeshError, StartupError) as error:
            if not runs:
                raise
            say_error(f"{error}; what was measured before follows")
            ended = FAILED
    return report(runs, reports, checks=client.echo) or ended or watch.told()


def _turns(disruption: DisruptionOptions, url: Url, seed: int) -> Sequence[Faults | None]:
    """An undisturbed run, and one with the faults, if any. Raises SettingsError."""
    if not disruption.faults():
        return (None,)
    # Needs psutil.
    from trtmesh.tools.bench.disruptions import faults_of

    return None, faults_of(disruption, url, seed)


async def _sweep(
    runs: list[Run],
    setup: Setup,
    loads: Sequence[Load],
    plans: Sequence[Plan],
    watch: Watch,
    turns: Sequence[Faults | None],
) -> None:
    """Adds a run for each load, with faults behind the undisturbed one, and compares both. Ctrl-C ends it."""
    for load in loads:
        for faults in turns:
            runs.append(await measure(setup, load, plans, replace(watch, disruptor=faults)))
            if faults:
                # Needs numpy.
                from trtmesh.tools.bench.survival import shown, survival

                for line in shown(survival(runs[-1], undisturbed=runs[-2])):
                    put(line)
            if runs[-1].is_interrupted:
                return


def report(runs: Sequence[Run], reports: ReportOptions, *, checks: bool) -> int:
    """Reports the runs whose figures are the server's, and returns the exit status."""
    fit = []
    for measured in runs:
        try:
            if checks:
                check_client(measured)
            fit.append(measured)
        except ClientTooSlow as error:
            say_error(str(error))
    for measured in runs:
        say(counted(measured))
    if any(measured.answers for measured in fit):
        reports.report(fit)
    if any(measured.is_interrupted for measured in runs):
        return INTERRUPTED
    failed = any(measured.count(AnswerOutcome.ERROR) for measured in runs)
    return FAILED if failed or len(fit) < len(runs) else OK


def counted(measured: Run) -> str:
    """Every item that was sent has one outcome; what was cut off is said."""
    end = measured.end
    counts = " + ".join(f"{measured.count(each)} {each}" for each in AnswerOutcome)
    parts = [f"{measured.title}: {len(measured.answers)} sent = {counts}"]
    if own := measured.header.echo:
        first, gap = (
            " / ".join(f"{ms:.2f}" for ms in each)
            for each in (own.added_first_ms, own.added_gap_ms)
        )
        parts.append(
            f"the client itself adds {first} ms to a first token and {gap} ms to a gap (p50 / p90 / p99), and takes at"
            f" most {measured.header.processes * own.tokens_per_s:,.0f} chunks/s"
        )
    if end and end.unsent:
        why = "Ctrl-C" if end.interrupted else "the end"
        parts.append(f"{end.unsent} prompts were not sent before {why}")
    return "; ".join(parts)
