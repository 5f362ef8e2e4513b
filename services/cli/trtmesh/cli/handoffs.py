"""`trtmesh handoffs`: KV moving between the workers of a router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.coming_back import repeated
from trtmesh.cli.output import local_time
from trtmesh.cli.session import OK
from trtmesh.cli.tables import handoffs_table
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
        return context.answer_each(seen.handoffs)
    tables = [handoffs_table(seen.handoffs)] if seen.handoffs else []
    workers = (await context.admin.list_workers()).workers
    so_far = "; ".join(_totals(workers)) or "none"
    count = f"{len(seen.handoffs) or 'none'} under way; so far {so_far}"
    return context.answer(seen, *tables, count)


def _totals(workers: Iterable[pb.Worker]) -> Iterator[str]:
    """Yields the completed handoffs of each worker, since the start."""
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
            headline = f"{local_time()}: {len(seen.handoffs)} handoffs"
            context.answer(seen, headline, handoffs_table(seen.handoffs))
        await asyncio.sleep(WATCH_SECONDS)


def _standing(seen: pb.ListHandoffsResponse) -> list[tuple[str, str, str]]:
    """The stage of each handoff. Ages are left out: they change with each look."""
    return [(each.lease_id, each.stage, each.receiver) for each in seen.handoffs]
