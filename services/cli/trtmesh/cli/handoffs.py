"""`trtmesh handoffs`: the KV on its way between the workers of a router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated

import typer
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.coming_back import repeated
from trtmesh.cli.output import put, put_json
from trtmesh.cli.session import OK
from trtmesh.cli.tables import handoffs_table, print_tables
from trtmesh.v1 import router_admin_pb2 as pb

WATCH_SECONDS = 0.25
"""Time between two looks of --watch."""


@admin_command
async def handoffs(
    context: Context,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="List again after each change, until Ctrl-C.")
    ] = False,
) -> int:
    """List the live handoffs, oldest first, with the worker that has the KV and the one that continues, and count the
    completed ones.

    In the stage `given` a client has the state of the KV, and may have brought it to another router. --watch looks
    every quarter of a second and may miss shorter handoffs. With --json one handoff
    per line, with --watch one list per line. Exit status: 0 success, 1 the call failed, 2 wrong usage, 130 Ctrl-C.
    """
    if watch:
        await _watch(context)
        return OK
    seen = await context.admin.list_handoffs()
    if context.as_json:
        for handoff in seen.handoffs:
            put_json(handoff)
    else:
        if seen.handoffs:
            print_tables(handoffs_table(seen.handoffs))
        under_way = len(seen.handoffs) or "none"
        workers = (await context.admin.list_workers()).workers
        put(f"{under_way} under way; so far {'; '.join(_totals(workers)) or 'none'}")
    return OK


def _totals(workers: Iterable[pb.Worker]) -> Iterator[str]:
    """The handoffs that each worker completed, since its start."""
    for worker in workers:
        sent, received = worker.load.sent_handoffs, worker.load.received_handoffs
        for counts, way in ((sent, "sent"), (received, "received")):
            if counts.consumed:
                yield f"{worker.worker or worker.address} {way} {counts.consumed}"


async def _watch(context: Context) -> None:
    told = None
    async for seen in repeated(context.admin.list_handoffs):
        if (standing := _standing(seen)) != told:
            told = standing
            _show(context, seen)
        await asyncio.sleep(WATCH_SECONDS)


def _standing(seen: pb.ListHandoffsResponse) -> list[tuple[str, str, str]]:
    """The stage of each handoff. Ages are left out: they change with each look."""
    return [(each.lease_id, each.stage, each.receiver) for each in seen.handoffs]


def _show(context: Context, seen: pb.ListHandoffsResponse) -> None:
    if context.as_json:
        put_json(seen)
    else:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        put(f"{now}: {len(seen.handoffs)} handoffs")
        print_tables(handoffs_table(seen.handoffs))
