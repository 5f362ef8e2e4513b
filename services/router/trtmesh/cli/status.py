"""`trtmesh status`: what a router sees."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from trtmesh.cli.generate import RouterOption
from trtmesh.cli.output import printable, put, say
from trtmesh.cli.session import FAILED, OK, connected, run
from trtmesh.client import DEFAULT_ADDRESS
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1.engine_pb2 import WorkerRole


def status(
    router: RouterOption = DEFAULT_ADDRESS,
    *,
    json: Annotated[bool, typer.Option("--json", help="The router's answer as JSON.")] = False,
) -> None:
    """Show the router's workers and tokenizers.

    Exit status: 0 a worker and a tokenizer are ready, 1 not so or no answer, 2 wrong usage.
    """
    run(_status(router, as_json=json))


async def _status(router: str, *, as_json: bool) -> int:
    async with connected(router) as client:
        seen = await client.status()
    if as_json:
        answer = MessageToDict(
            seen, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        put(json_module.dumps(answer, ensure_ascii=False, indent=2))
    else:
        _print_tables(router, seen)
    if _anything_ready(seen.workers) and _anything_ready(seen.tokenizers):
        return OK
    say(f"router {router} cannot serve: it needs a ready worker and a ready tokenizer")
    return FAILED


def _anything_ready(peers: Iterable[pb.Worker] | Iterable[pb.TokenizerReplica]) -> bool:
    return any(peer.state == pb.WORKER_STATE_READY for peer in peers)


def _print_tables(router: str, seen: pb.ListWorkersResponse) -> None:
    console = Console()
    console.print(
        f"router {router}: policy {seen.policy}, {seen.live_requests} live requests",
        highlight=False,
    )
    console.print(_workers(seen), _tokenizers(seen))


def _workers(seen: pb.ListWorkersResponse) -> Table:
    table = Table("worker", "address", "state", "model", "backend", "role", "items", "blocks used")
    table.add_column("problem", overflow="fold")
    for worker in seen.workers:
        engine, load = worker.engine, worker.load
        table.add_row(
            *map(
                printable,
                (
                    worker.worker or "?",
                    worker.address,
                    _word(pb.WorkerState, worker.state),
                    engine.model,
                    engine.backend,
                    _word(WorkerRole, engine.role),
                    str(worker.items),
                    f"{load.used_blocks}/{load.total_blocks}",
                    worker.problem,
                ),
            )
        )
    return table


def _tokenizers(seen: pb.ListWorkersResponse) -> Table:
    table = Table("tokenizer", "state", "model", "sequences")
    table.add_column("problem", overflow="fold")
    for replica in seen.tokenizers:
        table.add_row(
            *map(
                printable,
                (
                    replica.address,
                    _word(pb.WorkerState, replica.state),
                    replica.model,
                    str(replica.sequences),
                    replica.problem,
                ),
            )
        )
    return table


def _word(enum: Any, value: int) -> str:
    """WORKER_STATE_READY is `ready`; a value of a later version is its number."""
    if value not in enum.values():
        return str(value)
    return str(enum.Name(value)).rpartition("_")[2].lower()
