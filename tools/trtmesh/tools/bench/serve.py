"""`trtmesh bench serve`: sends a workload to a server under a load."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.errors import SettingsError, StartupError, TrtmeshError
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.option_groups import grouped, option
from trtmesh.cli.output import put, say, say_error
from trtmesh.cli.session import FAILED, INTERRUPTED, OK, ApiKeyFileOption, run
from trtmesh.cli.tls import CONNECTION, TlsOptions
from trtmesh.tools.bench.disruption_options import DisruptionOptions
from trtmesh.tools.bench.echo import ClientTooSlow, check_client
from trtmesh.tools.bench.loads import KINDS, read_numbers, read_ramp
from trtmesh.tools.bench.measuring import Setup, Watch, batched, measure, server_count
from trtmesh.tools.bench.record import (
    AnswerOutcome,
    Load,
    Plan,
    Run,
    RunFile,
    without_secrets,
)
from trtmesh.tools.bench.report import ReportOptions
from trtmesh.tools.bench.server_metrics import ServerMetrics
from trtmesh.tools.bench.targets.target import FORMS, Connecting, Url
from trtmesh.tools.bench.workloads.options import WorkloadOptions

LOAD = "Load"


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How to reach the server."""

    model: str = option("Model to ask; unset, the only one, or `ensemble`.", default="")
    api_key_file: ApiKeyFileOption = None
    tls: TlsOptions = field(default_factory=TlsOptions)

    def connecting(self, target: str) -> Connecting:
        """Raises SettingsError."""
        url, tls = Url.parse(target), self.tls.client_tls()
        if url.is_secure and tls is None:
            tls = ClientTls()
        found = Connecting(url, self.model, self.api_key_file, tls)
        # A bad key is refused before anything is sent.
        _ = found.api_key
        return found


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """When requests are sent. One of the first four."""

    concurrency: str | None = option(
        "Requests at a time, each followed by the next; several with commas are a run each. Default 1.",
        metavar="N[,N...]",
        panel=LOAD,
    )
    rate: str | None = option(
        "Requests per second at planned times; several with commas are a run each.",
        metavar="R[,R...]",
        panel=LOAD,
    )
    ramp: str | None = option(
        "Rates from the first to the last over a time: 1..20@60s, 1..20@60s:exponential.",
        metavar="R..R@S",
        panel=LOAD,
    )
    as_recorded: bool = option(
        "Send at the times of the trace.", "--as-recorded", default=False, panel=LOAD
    )
    speed: float = option("Speed of the trace.", default=1.0, min=1e-6, panel=LOAD)
    arrivals: str = option(f"Gaps at a --rate: {', '.join(KINDS)}.", default="poisson", panel=LOAD)
    burstiness: float = option(
        "Of gamma: 1 is poisson, less comes in bursts.", default=0.5, min=1e-3, panel=LOAD
    )
    duration: float | None = option(
        "Seconds after which the run ends; what is under way is cancelled.", min=0.001, panel=LOAD
    )
    warmup: int = option(
        "Requests before the run, without figures: the first of the workload.",
        default=0,
        min=0,
        panel=LOAD,
    )

    batch: int = option(
        "Prompts of a request; only grpc:// takes several.", default=1, min=1, panel=LOAD
    )

    def loads(self) -> list[Load]:
        """One of each run. Raises SettingsError."""
        given = [self.concurrency, self.rate, self.ramp, self.as_recorded or None]
        if sum(each is not None for each in given) > 1:
            raise SettingsError("give one of --concurrency, --rate, --ramp and --as-recorded")
        if self.arrivals not in KINDS:
            raise SettingsError(
                f"is {self.arrivals!r} but must be one of {', '.join(KINDS)}", setting="--arrivals"
            )
        if self.rate is not None:
            shape = {"burstiness": self.burstiness} if self.arrivals == "gamma" else {}
            rates = read_numbers(self.rate, "--rate")
            return [Load(self.arrivals, rate=rate, shape=shape) for rate in rates]
        if self.ramp is not None:
            return [read_ramp(self.ramp)]
        if self.as_recorded:
            return [Load("trace", shape={"speed": self.speed})]
        levels = read_numbers(self.concurrency or "1", "--concurrency")
        if any(level != int(level) for level in levels):
            raise SettingsError("must have whole numbers", setting="--concurrency")
        return [Load("closed", concurrency=int(level)) for level in levels]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How the tool sends, and what it keeps."""

    connections: int = option(
        "Connections of a process; over HTTP each request under way has one anyway.",
        default=1,
        min=1,
        panel=CONNECTION,
    )
    processes: int = option(
        "Processes that send, where one cannot keep up.", default=1, min=1, panel=CONNECTION
    )
    echo: bool = option(
        "Measure first what the client itself costs.", "--echo/--no-echo", default=True
    )
    timeout: float = option(
        "Seconds after which a request has failed.", default=600.0, min=0.001, panel=CONNECTION
    )
    record: Path | None = option("Write each answer to this file, for `bench compare`.")
    metrics: str | None = option(
        "Read the server's Prometheus metrics here each second, for the record and the page.",
        metavar="URL",
    )
    save_texts: bool = option("Keep texts in the record.", "--save-texts", default=False)

    def setup(self, connecting: Connecting, workload: str, seed: int) -> Setup:
        return Setup(
            connecting,
            workload,
            seed,
            command=without_secrets(["trtmesh", *sys.argv[1:]]),
            connections=self.connections,
            processes=self.processes,
            echoes=self.echo,
            timeout_s=self.timeout,
            keeps_text=self.save_texts,
        )

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watch]:
        """The record and the metrics. Raises SettingsError where one of them cannot be."""
        metrics = ServerMetrics(self.metrics) if self.metrics else None
        if metrics:
            await metrics.check()
        with RunFile(self.record) if self.record else nullcontext() as file:
            yield Watch(file, metrics=metrics)


@grouped
def serve(
    target: Annotated[str, typer.Argument(help=f"Server: {FORMS}.")],
    *,
    connection: TargetOptions,
    workload: WorkloadOptions,
    load: LoadOptions,
    client: ClientOptions,
    disruption: DisruptionOptions,
    reports: ReportOptions,
    seed: Annotated[int, typer.Option(help="Of the workload and of the times.")] = 0,
) -> None:
    """Send a workload to TARGET under a load, and report latencies, throughput, stalls and lost tokens.

    Prompts are completed greedily.

    Exit status: 0 done, 1 requests failed or the client was the bottleneck, 2 wrong usage, 130 Ctrl-C; then the answers
    so far are reported.
    """
    run(_serve(target, connection, workload, load, client, disruption, reports, seed))


async def _serve(
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
    return _report(runs, reports, checks=client.echo) or ended or watch.told()


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
            if is_interrupted(measured):
                return


def _report(runs: Sequence[Run], reports: ReportOptions, *, checks: bool) -> int:
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
    if any(map(is_interrupted, runs)):
        return INTERRUPTED
    failed = any(measured.count(AnswerOutcome.ERROR) for measured in runs)
    return FAILED if failed or len(fit) < len(runs) else OK


def is_interrupted(measured: Run) -> bool:
    return measured.end is not None and measured.end.interrupted


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
