"""`trtmesh bench report`: figures of recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.extras import check_extras
from trtmesh.cli.option_groups import grouped, option
from trtmesh.cli.output import put, readable
from trtmesh.cli.session import OK, run
from trtmesh.tools.bench.record import Run
from trtmesh.tools.bench.slo import parse_slos

if TYPE_CHECKING:
    from trtmesh.tools.bench.figures import Report


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is reported, beside the tables, and by which limits."""

    PANEL: ClassVar = "Reports"

    slo: list[str] | None = option(
        "Limits in milliseconds that a good answer keeps, as 'ttft:200 tpot:30'; also itl, e2e and gap, the longest"
        " gap. Repeatable.",
        metavar="NAME:MS",
    )
    html: Path | None = option("Write a page with plots to this file.")
    json: Path | None = option("Write JSON with aiperf's tags to this file.")
    csv: Path | None = option("Write a row for each figure to this file.")

    def check(self) -> None:
        """Raises before a run what would be raised behind it: SettingsError, StartupError."""
        check_extras(["bench"])
        parse_slos(self.slo or ())
        for path in filter(None, (self.html, self.json, self.csv)):
            # Nothing is added to the file.
            _write(path, b"", "ab")

    def figures(self, runs: Sequence[Run]) -> Report:
        # Needs numpy.
        from trtmesh.tools.bench.figures import report_of

        return report_of(runs, parse_slos(self.slo or ()))

    def write(self, found: Report) -> None:
        """Writes the files. Raises SettingsError at the end for those that could not be written."""
        # Needs jinja2.
        from trtmesh.tools.bench.reports import files
        from trtmesh.tools.bench.reports.page import as_html

        problems = []
        for path, content in (
            (self.html, as_html),
            (self.json, files.as_json),
            (self.csv, files.as_csv),
        ):
            try:
                if path:
                    _write(path, content(found))
            except SettingsError as error:
                problems.append(str(error))
        if problems:
            raise SettingsError("; ".join(problems))

    def report(self, runs: Sequence[Run]) -> None:
        """Writes the files and prints the tables, one also without the other: a disk may be full, a reader may
        leave."""
        found = self.figures(runs)
        try:
            self.write(found)
        finally:
            _print(found)


def _print(found: Report) -> None:
    from trtmesh.cli.tables import print_tables
    from trtmesh.tools.bench.reports.tables import run_tables, sweep_table

    for each in found.runs:
        put(f"{each.load}, {each.run.header.target}")
        for table in run_tables(each):
            print_tables(table)
            put("")
        for error, count in each.errors:
            put(readable(f"{count} x {error}"))
    if found.is_sweep:
        print_tables(sweep_table(found))


def _write(path: Path, content: bytes, mode: str = "wb") -> None:
    """Raises SettingsError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write(content)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


@grouped
def report(
    records: Annotated[
        list[Path], typer.Argument(help="Records of `bench serve --record`, together a sweep.")
    ],
    *,
    options: ReportOptions,
) -> None:
    """Report recorded runs, as tables or files: HTML, JSON, CSV.

    Exit status: 0 done, 2 a file cannot be read or written.
    """
    run(_report(records, options))


async def _report(records: Sequence[Path], options: ReportOptions) -> int:
    from trtmesh.tools.bench.run_file import read_runs

    options.check()
    options.report([each for record in records for each in read_runs(record)])
    return OK
