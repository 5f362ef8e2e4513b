"""`trtmesh top`: the fleet and streams of a router, live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from trtmesh.chassis.quoting import escaped
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.coming_back import repeated
from trtmesh.cli.output import as_fields, local_time, put_json
from trtmesh.cli.rates import Rates, Sample, measure
from trtmesh.cli.session import OK
from trtmesh.cli.tables import (
    LOAD_COLUMNS,
    add_row,
    fitted,
    generated_tokens,
    has_roles,
    load_columns,
    new_table,
    role_word,
    stage_words,
    worker_state,
)
from trtmesh.client import AdminClient
from trtmesh.v1 import router_admin_pb2 as pb

SPARE_OF_WORKERS = (
    *("KV\nreuse", "prompt\ntokens/s", *(each.heading for each in LOAD_COLUMNS)),
    *("KV\nreuse\nnow", "items", "role", "KV\nused"),
)
SPARE_OF_STREAMS = ("items", "age s", "unread", "stages")
"""Columns to leave out on a narrow terminal, in this order."""

Show = Callable[[Sample, Rates], None]


@admin_command
async def top(
    context: Context,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between updates.")
    ] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Number of updates; 0 means until Ctrl-C.")] = 0,
    limit: Annotated[
        int, typer.Option(min=1, max=2**31, help="Most requests shown, the oldest first.")
    ] = 20,
) -> int:
    """Show workers, their roles, live requests, token rates, KV reuse and handoffs, updated live.

    Rates span the time since the last update. KV reuse is the share of prompt tokens with cached KV since the workers
    started; now, since the last update. Running and waiting count sequences; unread are new tokens on their way
    to the client. Roles, adapters and handoffs have columns
    once a worker has some. With --json one update per line. Exit
    status: 0 after --count updates, 1 the call failed, 2 wrong usage, 130 Ctrl-C.
    """
    before: Sample | None = None
    with _shown(context) as show:
        look = 0
        async for sample in repeated(partial(_look, context.admin, limit)):
            show(sample, measure(before, sample))
            if (look := look + 1) == count:
                break
            before = sample
            await asyncio.sleep(interval)
    return OK


async def _look(admin: AdminClient, limit: int) -> Sample:
    fleet, requests = await asyncio.gather(admin.list_workers(), admin.list_requests(limit=limit))
    return Sample(time.monotonic(), fleet, requests)


@contextmanager
def _shown(context: Context) -> Iterator[Show]:
    """Shows JSON lines, a redrawn alternate screen, or in a pipe page after page."""
    console = Console()
    make = partial(page, console, context.admin.address)
    if context.as_json:
        yield _put_json_line
    elif console.is_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda sample, rates: live.update(make(sample, rates), refresh=True)
    else:
        yield lambda sample, rates: console.print(make(sample, rates), soft_wrap=True)


def _put_json_line(sample: Sample, rates: Rates) -> None:
    look = {
        "time": local_time("milliseconds"),
        **as_fields(sample.fleet),
        **as_fields(sample.requests),
        "rates": asdict(rates),
    }
    put_json(look)


def page(console: Console, address: str, sample: Sample, rates: Rates) -> Group:
    fleet = sample.fleet
    headline = (
        f"router {address}: policy {fleet.policy}, {fleet.live_requests} live requests,"
        f" {_number(rates.generated_tokens_per_second)} new tokens/s,"
        f" KV reuse {_share(rates.hit_rate)}, now {_share(rates.recent_hit_rate)}"
    )
    if fleet.HasField("hedging"):
        headline += _hedging(fleet.hedging)
    fleet_table = fitted(_fleet(sample, rates), console, SPARE_OF_WORKERS)
    return Group(
        Text(escaped(headline)),
        fleet_table,
        fitted(_streams(sample, rates), console, SPARE_OF_STREAMS),
    )


def _hedging(totals: pb.HedgeTotals) -> str:
    text = (
        f", {totals.started} hedges: {totals.won} won, {totals.saved_seconds:.1f} s saved,"
        f" {totals.wasted_tokens} tokens twice, {totals.refused} refused"
    )
    return f"{text}, {totals.differences} DIFFERENT" if totals.differences else text


def _fleet(sample: Sample, rates: Rates) -> Table:
    workers = sample.fleet.workers
    extra, role = load_columns(workers), ("role",) if has_roles(workers) else ()
    table = new_table(
        "worker", "state", *role, "items", "running", "waiting", "KV\nused", "prompt\ntokens/s", "new\ntokens/s",
        "KV\nreuse", "KV\nreuse\nnow", *(each.heading for each in extra), remark="problem",
    )  # fmt: skip
    for worker, rate in zip(workers, rates.workers, strict=True):
        load = worker.load
        used = load.used_blocks / load.total_blocks if load.total_blocks else None
        add_row(
            table,
            worker.worker or worker.address,
            worker_state(worker),
            *((role_word(worker),) if role else ()),
            worker.items,
            load.running_sequences,
            load.waiting_sequences,
            _share(used),
            _number(rate.prompt_tokens_per_second),
            _number(rate.generated_tokens_per_second),
            _share(rate.hit_rate),
            _share(rate.recent_hit_rate),
            *(each.cell(load) for each in extra),
            worker.problem,
        )
    return table


def _streams(sample: Sample, rates: Rates) -> Table:
    table = new_table(
        "request", "age s", "items", "stages", "new\ntokens", "new\ntokens/s", "unread"
    )
    for request, rate in zip(sample.requests.requests, rates.requests, strict=True):
        add_row(
            table,
            request.request_id,
            f"{request.age_ms / 1000:.1f}",
            len(request.items),
            stage_words(request),
            generated_tokens(request),
            _number(rate.tokens_per_second),
            request.waiting_tokens,
        )
    if hidden := sample.requests.live_requests - len(sample.requests.requests):
        table.caption = f"and {hidden} more"
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
