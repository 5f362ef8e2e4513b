"""`trtmesh bench compare`: whether two runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.extras import check_extras
from trtmesh.cli.output import put, say
from trtmesh.cli.session import FAILED, OK, run
from trtmesh.tools.bench.record import Run


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Record of `bench serve --record`.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Record of the same workload.")],
    threshold: Annotated[
        float,
        typer.Option(min=0.0, help="Share by which a figure may be worse: 0.05 is 5 %."),
    ] = 0.05,
) -> None:
    """Compare the runs of B with those of A, prompt by prompt, by ratios with intervals.

    A difference is noise where the interval includes 1. The intervals of a table hold together with 95 %. Runs are
    paired by their load; a file with one run each is compared whatever the loads.

    Exit status: 0 no regression, 1 a figure is worse beyond the threshold, 2 the runs cannot be compared.
    """
    run(_compare(a, b, threshold))


async def _compare(a: Path, b: Path, threshold: float) -> int:
    check_extras(["bench"])
    # Needs numpy.
    from trtmesh.cli.tables import print_tables
    from trtmesh.tools.bench.comparison import compare as compared
    from trtmesh.tools.bench.reports.tables import comparison_line, comparison_table
    from trtmesh.tools.bench.run_file import read_runs

    status = OK
    for one, other in _paired(read_runs(a), read_runs(b)):
        found = compared(one, other, threshold)
        put(comparison_line(found))
        print_tables(comparison_table(found.ratios))
        if found.is_regression:
            status = FAILED
    return status


def _paired(a: Sequence[Run], b: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    if len(a) == len(b) == 1:
        yield a[0], b[0]
        return
    loads = [{run.title: run for run in runs} for runs in (a, b)]
    if not loads[0].keys() & loads[1].keys():
        raise SettingsError("the files have no load in common: there is nothing to compare")
    for load in [*loads[0], *(each for each in loads[1] if each not in loads[0])]:
        if all(load in each for each in loads):
            yield loads[0][load], loads[1][load]
        else:
            say(f"trtmesh: note: only {'AB'[load in loads[1]]} has a run of {load}")
