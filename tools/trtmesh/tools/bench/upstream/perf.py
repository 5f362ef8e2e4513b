"""`trtmesh bench perf`: upstream's figures over a matrix of input lengths, output lengths and batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.option_groups import grouped
from trtmesh.cli.output import say_error
from trtmesh.cli.session import FAILED, OK, run
from trtmesh.cli.tables import add_row, new_table, print_tables
from trtmesh.tools.bench.measuring import server_count
from trtmesh.tools.bench.record import Load, Plan
from trtmesh.tools.bench.serve import TargetOptions
from trtmesh.tools.bench.targets.target import FORMS, Connecting
from trtmesh.tools.bench.upstream.core import measured
from trtmesh.tools.bench.upstream.statistics import append_csv
from trtmesh.tools.bench.workloads.lengths import MOST_TOKENS
from trtmesh.tools.bench.workloads.options import WorkloadOptions

MOST_BATCH = 65_536

Cell = Mapping[str, int]
"""A part of the matrix: its batch, input and output."""


@grouped
def perf(
    target: Annotated[str, typer.Argument(help=f"Server: {FORMS}.")],
    *,
    connection: TargetOptions,
    input_len: Annotated[str, typer.Option(metavar="N[,N...]", help="Tokens of a prompt.")] = "128",
    output_len: Annotated[str, typer.Option(metavar="N[,N...]", help="Tokens of an answer.")] = "8",
    batch_size: Annotated[str, typer.Option(metavar="N[,N...]", help="Requests at a time.")] = "1",
    rounds: Annotated[
        int, typer.Option(min=1, help="Requests of a cell, for each at a time.")
    ] = 10,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or a directory with one.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Append the figures here.")] = None,
) -> None:
    """Measure every combination of input length, output length and batch size, from text to text.

    Each cell keeps the batch size under way until its requests are answered, after 10 that warm up.

    Exit status: 0 done, 1 requests failed, 2 wrong usage.
    """

    def cells() -> list[Cell]:
        batches = _sizes(batch_size, "--batch-size", MOST_BATCH)
        inputs = _sizes(input_len, "--input-len", MOST_TOKENS)
        outputs = _sizes(output_len, "--output-len", MOST_TOKENS)
        sizes = product(batches, inputs, outputs)
        return [dict(zip(("batch", "input", "output"), each, strict=True)) for each in sizes]

    run(_perf(connection, target, cells, rounds, tokenizer, csv))


def _sizes(text: str, setting: str, most: int) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= most for part in parts):
        raise SettingsError(
            f"is {text!r} but must be numbers of 1 to {most} with commas", setting=setting
        )
    return [*map(int, parts)]


async def _perf(
    connection: TargetOptions,
    target: str,
    cells: Callable[[], Sequence[Cell]],
    rounds: int,
    tokenizer: Path | None,
    csv: Path | None,
) -> int:
    connecting = connection.connecting(target)
    rows = []
    for cell in cells():
        plans = await _plans(connecting, cell, rounds, tokenizer)
        name = ", ".join(f"{name} {size}" for name, size in cell.items())
        found = await measured(connecting, Load("closed", concurrency=cell["batch"]), plans, name)
        if isinstance(found, str):
            say_error(f"{name}: {found}")
            return FAILED
        rows.append({**cell, **found.rows()})
    table = new_table(*rows[0])
    for row in rows:
        add_row(
            table, *(value if isinstance(value, int) else f"{value:.2f}" for value in row.values())
        )
    print_tables(table)
    if csv:
        append_csv(csv, rows)
    return OK


async def _plans(
    connecting: Connecting, cell: Cell, rounds: int, tokenizer: Path | None
) -> Sequence[Plan]:
    options = WorkloadOptions(
        requests=rounds * cell["batch"],
        input_tokens=str(cell["input"]),
        output_tokens=str(cell["output"]),
        tokenizer=tokenizer,
    )
    return await options.plans(0, await server_count(connecting))
