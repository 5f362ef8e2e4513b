"""`trtmesh bench perf`: upstream's figures over a matrix of input lengths, output lengths and batch sizes."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.option_groups import grouped
from trtmesh.cli.session import INTERRUPTED, OK, run
from trtmesh.cli.tables import add_row, new_table, print_tables
from trtmesh.tools.bench.measuring import server_count
from trtmesh.tools.bench.options import TargetOptions
from trtmesh.tools.bench.record import Load
from trtmesh.tools.bench.targets.target import FORMS
from trtmesh.tools.bench.upstream.core import measured
from trtmesh.tools.bench.upstream.statistics import Figures, append_csv
from trtmesh.tools.bench.workloads.lengths import MOST_TOKENS
from trtmesh.tools.bench.workloads.options import WorkloadOptions

MOST_BATCH = 65_536


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

    Exit status: 0 done, 1 requests failed, 2 wrong usage, 130 Ctrl-C; then the cells so far are reported.
    """

    async def matrix() -> int:
        sizes = product(
            _sizes(batch_size, "--batch-size", MOST_BATCH),
            _sizes(input_len, "--input-len", MOST_TOKENS),
            _sizes(output_len, "--output-len", MOST_TOKENS),
        )
        rows, status = list[Figures](), OK
        connecting = connection.connecting(target)
        count = await server_count(connecting)
        for batch, prompt, answer in sizes:
            cell = {"batch": batch, "input": prompt, "output": answer}
            drawn = WorkloadOptions(
                requests=rounds * batch,
                input_tokens=str(prompt),
                output_tokens=str(answer),
                tokenizer=tokenizer,
            )
            load, name = Load("closed", batch), ", ".join(f"{k} {v}" for k, v in cell.items())
            try:
                plans = await drawn.plans(0, count)
            except asyncio.CancelledError:
                status = INTERRUPTED
                break
            found, status = await measured(connecting, load, plans, name)
            if found:
                rows.append({**cell, **found})
            if status:
                break
        if rows:
            table = new_table(*rows[0])
            for row in rows:
                add_row(table, *(f"{n:.2f}".removesuffix(".00") for n in row.values()))
            print_tables(table)
            if csv:
                append_csv(csv, rows)
        return status

    run(matrix())


def _sizes(text: str, setting: str, most: int) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= most for part in parts):
        raise SettingsError(
            f"is {text!r} but must be numbers of 1 to {most} with commas", setting=setting
        )
    return [*map(int, parts)]
