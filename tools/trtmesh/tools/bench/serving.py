"""A run for each load of `bench serve`, with its faults, and the report of all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from trtmesh.chassis.errors import SettingsError, StartupError, TrtmeshError
from trtmesh.cli.output import put, say, say_error
from trtmesh.cli.session import FAILED, INTERRUPTED, OK
from trtmesh.tools.bench.disruption_options import DisruptionOptions
from trtmesh.tools.bench.echo import ClientTooSlow, check_client
from trtmesh.tools.bench.measuring import Setup, Watch, batched, measure, server_count
from trtmesh.tools.bench.options import ClientOptions, LoadOptions, TargetOptions
from trtmesh.tools.bench.record import AnswerOutcome, Load, Plan, Run
from trtmesh.tools.bench.report import ReportOptions
from trtmesh.tools.bench.workloads.options import WorkloadOptions


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
    given = disruption.undisturbed()
    setup = replace(
        client.setup(connection.connecting(target), str(workload), seed),
        warmup=load.warmup,
        duration_s=load.duration,
    )
    if load.batch > 1 and setup.connecting.url.protocol != "grpc":
        raise SettingsError("is for grpc:// alone", setting="--batch")
    loads = load.loads()
    count = await server_count(setup.connecting)
    plans = batched(await workload.plans(setup.seed, count), load.batch)
    runs: list[Run] = []
    async with client.watch() as watch:
        ended = OK
        try:
            await _sweep(runs, setup, loads, plans, watch, disruption, given)
        except asyncio.CancelledError:
            ended = INTERRUPTED
        except (TrtmeshError, StartupError) as error:
            if not runs:
                raise
            say_error(f"{error}; what was measured before follows")
            ended = FAILED
    return report(runs, reports, checks=client.echo) or ended or watch.told()


async def _sweep(
    runs: list[Run],
    setup: Setup,
    loads: Sequence[Load],
    plans: Sequence[Plan],
    watch: Watch,
    disruption: DisruptionOptions,
    given: Run | None,
) -> None:
    """Adds a run for each load, with faults behind the undisturbed one, and compares both. Ctrl-C ends it."""
    undisturbed = given
    for load in loads:
        for faults in disruption.turns(setup.connecting.url, setup.seed):
            measured = await measure(setup, load, plans, replace(watch, disruptor=faults))
            runs.append(measured)
            if faults is None:
                undisturbed = given or measured
            elif undisturbed:
                # Needs numpy.
                from trtmesh.tools.bench.survival import shown, survival

                for line in shown(survival(measured, undisturbed)):
                    put(line)
            if measured.is_interrupted:
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
