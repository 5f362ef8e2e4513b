"""`trtmesh status`, `trtmesh workers` and `trtmesh policy`: show and change the fleet of a router."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.quoting import escaped
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.coming_back import followed
from trtmesh.cli.completion import complete_policy, complete_worker
from trtmesh.cli.output import put, put_json, say, say_error
from trtmesh.cli.session import FAILED, OK, USAGE
from trtmesh.cli.tables import (
    print_tables,
    role_word,
    tokenizers_table,
    worker_state,
    workers_table,
)
from trtmesh.v1 import router_admin_pb2 as pb

policy = typer.Typer(name="policy", help="The placement policy of a router.", no_args_is_help=True)
workers = typer.Typer(name="workers", help="The workers of a router.", no_args_is_help=True)

WorkerArgument = Annotated[
    str,
    typer.Argument(
        help="Name of a worker, or its address if several have the name.",
        autocompletion=complete_worker,
    ),
]


class Role(StrEnum):
    """Phases of a worker."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


@admin_command
async def status(context: Context) -> int:
    """Show the router's workers and tokenizers.

    Exit status: 0 a worker and a tokenizer are ready, 1 otherwise or no answer, 2 wrong usage.
    """
    router, seen = context.admin.address, await context.admin.list_workers()
    if context.as_json:
        put_json(seen)
    else:
        drains = ", drains: it refuses new requests" if seen.draining else ""
        put(f"router {router}: policy {seen.policy}, {seen.live_requests} live requests{drains}")
        print_tables(workers_table(seen.workers), tokenizers_table(seen.tokenizers))
    if _anything_ready(seen.workers) and _anything_ready(seen.tokenizers):
        return OK
    say(f"router {router} cannot serve: it needs a ready worker and a ready tokenizer")
    return FAILED


@workers.command("list")
@admin_command
async def list_workers(context: Context) -> int:
    """List the workers; with --json one worker per line."""
    seen = await context.admin.list_workers()
    if context.as_json:
        for worker in seen.workers:
            put_json(worker)
    else:
        print_tables(workers_table(seen.workers))
    return OK


@workers.command()
@admin_command
async def watch(context: Context) -> int:
    """Print the workers now and after each join, leave or change of state, until Ctrl-C.

    With --json one list per line, also after changes of load only. After a lost connection it asks again. Exit
    status: 1 the first call failed, 2 wrong usage, 130 Ctrl-C.
    """
    told = None
    async for seen in followed(context.admin.watch_workers):
        if context.as_json:
            put_json(seen)
        elif (standing := _standing(seen)) != told:
            told = standing
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            put(f"{now}: {len(seen.workers)} workers")
            print_tables(workers_table(seen.workers))
    return FAILED


def _standing(seen: pb.WatchWorkersResponse) -> list[tuple[str, str, str, str, str]]:
    """State and role of each worker. Loads are left out: they change with each step."""
    return [(w.worker, w.address, worker_state(w), role_word(w), w.problem) for w in seen.workers]


@workers.command()
@admin_command
async def add(
    context: Context,
    address: Annotated[
        str,
        typer.Argument(help="Address of the worker, host:port or vllm://host:port and its like."),
    ],
    wait: Annotated[
        float,
        typer.Option(
            min=0, max=86400, help="Seconds for the worker to answer; 0 adds it without waiting."
        ),
    ] = 5.0,
) -> int:
    """Make the router connect to a worker, and wait for its answer; without one it is removed again.

    It stays until the router restarts; list it in `router.engines` to keep it.

    Exit status: 0 added, 1 no answer or the call failed, 2 wrong usage.
    """
    try:
        response = await context.admin.add_worker(address, wait_seconds=wait)
    except InvalidField as error:
        say_error(f"{error.reason}: {error}")
        return USAGE
    _show(context, response, response.worker)
    return OK


@workers.command()
@admin_command
async def drain(
    context: Context,
    worker: WorkerArgument,
    finish_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=4_000_000,
            help="Time for its sequences to end, in seconds, before the rest moves; unset waits for all.",
        ),
    ] = None,
) -> int:
    """Have a worker refuse new items, of all routers, and wait until its sequences of this router have ended or moved.

    The worker stays drained until `resume` or its end, even if the router restarts.

    Exit status: 0 drained, 1 sequences are left or the call failed, 2 wrong usage, 130 Ctrl-C.
    """
    response = await context.admin.drain_worker(worker, finish_seconds=finish_seconds)
    _show(context, response, response.worker)
    if not context.as_json:
        put(f"sequences: {response.finished_sequences} ended, {response.moved_sequences} moved")
    if response.only_here:
        say(
            "this router alone places nothing more there, until it restarts: the worker is not connected, or older"
        )
    if response.left_sequences:
        say(f"{response.left_sequences} sequences are left: no other worker accepts them")
        return FAILED
    return OK


@workers.command()
@admin_command
async def resume(context: Context, worker: WorkerArgument) -> int:
    """Place items on a drained worker again. `add` brings back a removed one."""
    response = await context.admin.resume_worker(worker)
    _show(context, response, response.worker)
    return OK


@workers.command()
@admin_command
async def role(
    context: Context,
    worker: WorkerArgument,
    role: Annotated[Role, typer.Argument(help="The phases that it is for.")],
) -> int:
    """Change the role of a worker, for all routers; sequences of another phase are handed over.

    Exit status: 0 changed, 1 the backend has no such role or the call failed, 2 wrong usage, 130 Ctrl-C.
    """
    response = await context.admin.set_worker_role(worker, role)
    if context.as_json:
        put_json(response)
    else:
        put(escaped(f"worker {worker} is for {role}; {response.moved_sequences} sequences moved"))
    return OK


@workers.command()
@admin_command
async def remove(context: Context, worker: WorkerArgument) -> int:
    """Remove a worker from the router; its sequences move.

    A router that restarts connects again to what `router.engines` names.
    """
    response = await context.admin.remove_worker(worker)
    if context.as_json:
        put_json(response)
    else:
        put(f"{worker} was removed; {response.moved_sequences} sequences moved")
    return OK


def _anything_ready(peers: Iterable[pb.Worker] | Iterable[pb.TokenizerReplica]) -> bool:
    return any(peer.state == pb.WORKER_STATE_READY for peer in peers)


def _show(
    context: Context,
    response: pb.AddWorkerResponse | pb.DrainWorkerResponse | pb.ResumeWorkerResponse,
    worker: pb.Worker,
) -> None:
    if context.as_json:
        put_json(response)
    else:
        name = f"{worker.worker} at {worker.address}" if worker.worker else worker.address
        problem = f": {worker.problem}" if worker.problem else ""
        put(escaped(f"worker {name} is {worker_state(worker)}{problem}"))


@policy.command("get")
@admin_command
async def get_policy(context: Context) -> int:
    """Print all policies and mark the current one."""
    response = await context.admin.get_policy()
    if context.as_json:
        put_json(response)
    else:
        for name in response.available:
            put(f"{'*' if name == response.policy else ' '} {name}")
    return OK


@policy.command("set")
@admin_command
async def set_policy(
    context: Context,
    policy: Annotated[
        str, typer.Argument(help="One of `policy get`.", autocompletion=complete_policy)
    ],
) -> int:
    """Change the policy until the router ends.

    Exit status: 0 changed, 1 the call failed, 2 unknown policy or other wrong usage.
    """
    try:
        response = await context.admin.set_policy(policy)
    except InvalidField as error:
        say_error(f"{error.reason}: {error}")
        return USAGE
    if context.as_json:
        put_json(response)
    else:
        put(f"policy {policy}, {response.previous} until now")
    return OK
