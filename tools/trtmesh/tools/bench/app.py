"""`trtmesh bench`: the commands that measure servers."""

from __future__ import annotations

from typing import ClassVar

from trtmesh.cli.lazy import LazyCommand, LazyGroup
from trtmesh.cli.plain_help import CommandGroup


class BenchCommands(LazyGroup):
    """Each command's module is imported when it is used."""

    lazy: ClassVar[tuple[LazyCommand, ...]] = (
        LazyCommand(
            "trtmesh.tools.bench.serve:serve",
            "Send a workload to TARGET under a load, and report latencies, throughput, stalls and lost tokens.",
        ),
        LazyCommand(
            "trtmesh.tools.bench.find:find",
            "Find the highest rate of poisson arrivals at which the answers of TARGET meet the SLOs, by bisection.",
        ),
        LazyCommand(
            "trtmesh.tools.bench.compare:compare",
            "Compare the runs of B with those of A, prompt by prompt, by ratios with intervals.",
        ),
        LazyCommand(
            "trtmesh.tools.bench.report:report",
            "Report recorded runs, as tables or files: HTML, JSON, CSV.",
        ),
        LazyCommand(
            "trtmesh.tools.bench.upstream.core:core",
            "Measure a model of token ids as upstream's benchmark_core_model.py does: its flags, its load, its table.",
        ),
        LazyCommand(
            "trtmesh.tools.bench.upstream.core:identity",
            "Measure a model of token ids as upstream's identity_test.py does: a dataset at once, and its total"
            " latencies.",
        ),
        LazyCommand(
            "trtmesh.tools.bench.upstream.perf:perf",
            "Measure every combination of input length, output length and batch size, from text to text.",
        ),
    )


bench = CommandGroup(
    name="bench",
    cls=BenchCommands,
    help="Measure a server, compare two runs, and prove that no byte was lost.",
    no_args_is_help=True,
)
