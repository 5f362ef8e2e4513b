"""`trtmesh bench serve`: sends a workload to a server under a load."""

from __future__ import annotations

from typing import Annotated

import typer
from trtmesh.cli.option_groups import grouped
from trtmesh.cli.session import run
from trtmesh.tools.bench.faults import DisruptionOptions
from trtmesh.tools.bench.options import ClientOptions, LoadOptions, TargetOptions
from trtmesh.tools.bench.report import ReportOptions
from trtmesh.tools.bench.targets.target import FORMS
from trtmesh.tools.bench.workloads.options import WorkloadOptions


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
    # A second of imports, which help does without.
    from trtmesh.tools.bench.serving import served

    run(served(target, connection, workload, load, client, disruption, reports, seed))
