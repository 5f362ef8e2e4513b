"""`trtmesh status`: the workers and tokenizers of a router."""

from __future__ import annotations

from collections.abc import Iterable

from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.output import put, put_json, say
from trtmesh.cli.session import FAILED, OK
from trtmesh.cli.tables import print_tables, tokenizers_table, workers_table
from trtmesh.v1 import router_admin_pb2 as pb


@admin_command
async def status(context: Context) -> int:
    """Show the router's workers and tokenizers.

    Exit status: 0 a worker and a tokenizer are ready, 1 otherwise or no answer, 2 wrong usage.
    """
    router, seen = context.admin.address, await context.admin.list_workers()
    if context.as_json:
        put_json(seen)
    else:
        put(f"router {router}: policy {seen.policy}, {seen.live_requests} live requests")
        print_tables(workers_table(seen.workers), tokenizers_table(seen.tokenizers))
    if _anything_ready(seen.workers) and _anything_ready(seen.tokenizers):
        return OK
    say(f"router {router} cannot serve: it needs a ready worker and a ready tokenizer")
    return FAILED


def _anything_ready(peers: Iterable[pb.Worker] | Iterable[pb.TokenizerReplica]) -> bool:
    return any(peer.state == pb.WORKER_STATE_READY for peer in peers)
